# Shared by scripts/install and scripts/uninstall: paths, and releases side by side.
# shellcheck shell=bash disable=SC2034 # the names are used by the scripts that source this
# Sourced under `set -euo pipefail` with `top` set: empty, or a folder to use as / (for tests).
#
#   /opt/numa-launcher/releases/VERSION-TIME/{venv,files,.complete}
#   /opt/numa-launcher/current -> releases/VERSION-TIME     used by the next start
#   /opt/numa-launcher/previous -> releases/VERSION-TIME    used by --rollback
#
# A complete release is never changed: running processes keep using it until they are restarted. rename(2) switches
# the links, so that they always exist.

: "${top=}"
readonly prefix=$top/opt/numa-launcher etc=$top/etc/numa-launcher units=$top/etc/systemd/system
readonly command=$top/usr/local/bin/numa-launcher share=$top/usr/local/share lib=$top/usr/lib
readonly releases=$prefix/releases
# Name of a release made from the former layout: one environment in /opt/numa-launcher/venv, changed in place.
readonly OLD_LAYOUT=old-layout

readonly UNITS=(numa-launcher.service numa-launcher.socket numa-launcher-control.socket numa-launcher.slice
  numa-launcher-dashboard.service numa-launcher-ray.service numa-launcher-ingress.service)
# Files of a release besides its environment, as FILE-OF-THE-CHECKOUT:WHERE.
readonly FILES=(
  "systemd/numa-launcher.service:$units/numa-launcher.service"
  "systemd/numa-launcher.socket:$units/numa-launcher.socket"
  "systemd/numa-launcher-control.socket:$units/numa-launcher-control.socket"
  "systemd/numa-launcher.slice:$units/numa-launcher.slice"
  "systemd/numa-launcher-dashboard.service:$units/numa-launcher-dashboard.service"
  "systemd/numa-launcher-ray.service:$units/numa-launcher-ray.service"
  "systemd/numa-launcher-ingress.service:$units/numa-launcher-ingress.service"
  "systemd/sysusers.conf:$lib/sysusers.d/numa-launcher.conf"
  "systemd/tmpfiles.conf:$lib/tmpfiles.d/numa-launcher.conf"
  "configs/shell/numa-launcher.1:$share/man/man1/numa-launcher.1"
  "configs/shell/numa-launcher.bash:$share/bash-completion/completions/numa-launcher"
  "configs/shell/_numa-launcher:$share/zsh/site-functions/_numa-launcher"
  "configs/shell/numa-launcher.fish:$share/fish/vendor_completions.d/numa-launcher.fish"
)

# release_of LINK: the release that current or previous points to; empty if there is none.
release_of() {
  local found
  found=$(readlink "$prefix/$1" 2>/dev/null) && [[ -e $prefix/$found/.complete ]] || return 0
  echo "$prefix/$found"
}

# point LINK RELEASE: switches a link atomically.
point() {
  ln -sfn "releases/${2##*/}" "$prefix/.$1.new"
  mv -fT "$prefix/.$1.new" "$prefix/$1"
}

# put FILE WHERE: replaces a file atomically, readable by all users.
put() {
  mkdir -p "${2%/*}"
  install -m 0644 "$1" "$2.new"
  mv -fT "$2.new" "$2"
}

# take_old_layout: registers /opt/numa-launcher/venv of the former layout as a release, without moving it.
take_old_layout() {
  [[ -d $prefix/venv && ! -L $prefix/venv && ! -L $prefix/current ]] || return 0
  local old=$releases/$OLD_LAYOUT file
  mkdir -p "$old/files"
  ln -sfn ../../venv "$old/venv"
  for file in "${FILES[@]}"; do
    [[ ! -e ${file#*:} ]] || install -D -m 0644 "${file#*:}" "$old/files/${file%%:*}"
  done
  touch "$old/.complete"
  point current "$old"
  say "$prefix/venv is kept as the previous release"
}

# drop_incomplete: removes releases of interrupted installations.
drop_incomplete() {
  local release
  for release in "$releases"/*; do
    if [[ -d $release && ! -e $release/.complete ]]; then
      rm -rf "$release"
      say "${release##*/}: never completed, removed"
    fi
  done
}

# switch_to RELEASE: installs its units and pages, then switches the links.
switch_to() {
  local file now
  for file in "${FILES[@]}"; do
    [[ ! -e $1/files/${file%%:*} ]] || put "$1/files/${file%%:*}" "${file#*:}"
  done
  now=$(release_of current)
  [[ -z $now || $now == "$1" ]] || point previous "$now"
  point current "$1"
  mkdir -p "${command%/*}"
  ln -sfn "$prefix/current/venv/bin/numa-launcher" "$command.new"
  mv -fT "$command.new" "$command"
  # Configurations may name programs by the path of the former layout.
  [[ -e $prefix/venv ]] || ln -sfn current/venv "$prefix/venv"
}

# in_use RELEASE: whether a process runs from it; /proc/PID/maps has the real paths of its libraries.
in_use() {
  local venv
  venv=$(readlink -f "$1/venv") || return 1
  grep -qsaF -- "$venv/" /proc/[0-9]*/maps /proc/[0-9]*/cmdline
}

# prune KEEP: removes all releases but current, previous, the KEEP newest and those in use.
prune() {
  local release kept=0 now before
  now=$(release_of current) before=$(release_of previous)
  while read -r release; do
    release=${release%/.complete}
    kept=$((kept + 1))
    if [[ $release == "$now" || $release == "$before" ]] || ((kept <= $1)); then
      continue
    elif in_use "$release"; then
      say "${release##*/} is kept: processes run from it"
    else
      [[ ${release##*/} != "$OLD_LAYOUT" ]] || rm -rf "$prefix/venv"
      rm -rf "$release"
      [[ -e $prefix/venv ]] || ln -sfn current/venv "$prefix/venv"
      say "${release##*/} removed"
    fi
  done < <(ls -1td "$releases"/*/.complete 2>/dev/null)
}
