#!/usr/bin/env bash
# Debian packages that the sandbox and the weight transfer need: installed when root, else named with the exact command.
set -euo pipefail
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v nsenter >/dev/null || missing+=(util-linux)
command -v ip >/dev/null || missing+=(iproute2)
ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "please install what provides: ${missing[*]} (Debian's names)" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "missing system packages. Run: sudo apt-get install -y ${missing[*]}" >&2
    exit 1
fi
echo "installing system packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install_log=$(mktemp)
trap 'rm -f "$install_log"' EXIT
apt-get install -y -q "${missing[@]}" >"$install_log" 2>&1 ||
    { apt-get update -q >"$install_log" 2>&1 && apt-get install -y -q "${missing[@]}" >"$install_log" 2>&1; } ||
    { tail -n 20 "$install_log" >&2; exit 1; }
