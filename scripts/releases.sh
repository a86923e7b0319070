# Shared by scripts/install and scripts/uninstall: where things are put, and releases side by side.
# shellcheck shell=bash disable=SC2034 # the names are used by the scripts that source this
# Sourced under `set -euo pipefail` with `top` set: empty, or a folder that takes the place of / (for tests).
#
#   /opt/numa-launcher/releases/VERSION-TIME/{venv,files,.complete}
#   /opt/numa-launcher/current -> releases/VERSION-TIME     what is started next
#   /opt/numa-launcher/previous -> releases/VERSION-TIME    what --rollback goes back to
#
# A release is never changed once it is complete: running processes keep it until they are restarted. Links are
# switched by rename(2), so there is always one.

: "${top=}"
readonly prefix=$top/opt/numa-launcher etc=$top/etc/numa-launcher units=$top/etc/systemd/system
readonly command=$top/usr/local/bin/numa-launcher share=$top/usr/local/share lib=$top/usr/lib
readonly releases=$prefix/releases
# How the layout before this one is called: one environment in /opt/numa-launcher/venv, changed in place.
readonly OLD_LAYOUT=old-layout

readonly UNITS=(numa-launcher.service numa-launcher.socket numa-launcher-control.socket numa-launcher.slice)
# What a release brings beside its environment, as FILE-OF-THE-CHECKOUT:WHERE.
readonly FILES=(
  "systemd/numa-launcher.service:$units/numa-launcher.service"
  "systemd/numa-launcher.socket:$units/numa-launcher.socket"
  "systemd/numa-launcher-control.socket:$units/numa-launcher-control.socket"
  "systemd/numa-launcher.slice:$units/numa-launcher.slice"
  "systemd/sysusers.conf:$lib/sysusers.d/numa-launcher.conf"
  "systemd/tmpfiles.conf:$lib/tmpfiles.d/numa-launcher.conf"
  "configs/shell/numa-launcher.1:$share/man/man1/numa-launcher.1"
  "configs/shell/numa-launcher.bash:$share/bash-completion/completions/numa-launcher"
  "configs/shell/_numa-launcher:$share/zsh/site-functions/_numa-launcher"
  "configs/shell/numa-launcher.fish:$share/fish/vendor_completions.d/numa-launcher.fish"
)

# release_of LINK: the folder that current or previous leads to; nothing where there is none.
release_of() {
  local found
  found=$(readlink "$prefix/$1" 2>/dev/null) && [[ -e $prefix/$found/.complete ]] || return 0
  echo "$prefix/$found"
}

# point LINK RELEASE: at once, whatever was there.
point() {
  ln -sfn "releases/${2##*/}" "$prefix/.$1.new"
  mv -fT "$prefix/.$1.new" "$prefix/$1"
}

# put FILE WHERE: replaced at once, readable by all.
put() {
  mkdir -p "${2%/*}"
  install -m 0644 "$1" "$2.new"
  mv -fT "$2.new" "$2"
}

# take_old_layout: /opt/numa-launcher/venv, made by an installer before this one, becomes a release where it is.
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
  say "$prefix/venv is kept as the release before this one"
}

# drop_incomplete: what an installation that was killed has left.
drop_incomplete() {
  local release
  for release in "$releases"/*; do
    if [[ -d $release && ! -e $release/.complete ]]; then
      rm -rf "$release"
      say "${release##*/}: never completed, removed"
    fi
  done
}

# switch_to RELEASE: its units and pages, then the links.
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
  # Configurations may name programs in the environment by the path of the layout before this one.
  [[ -e $prefix/venv ]] || ln -sfn current/venv "$prefix/venv"
}

# in_use RELEASE: whether a process runs from it. Its libraries are mapped under their real path.
in_use() {
  local venv
  venv=$(readlink -f "$1/venv") || return 1
  grep -qsaF -- "$venv/" /proc/[0-9]*/maps /proc/[0-9]*/cmdline
}

# prune KEEP: all but current, previous, the KEEP newest, and those that something runs from.
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
