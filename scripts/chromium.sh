#!/usr/bin/env bash
# Chromium for the tests of the viewer: Debian's package, installed when root, else named with the exact command.
set -euo pipefail
command -v chromium >/dev/null && exit 0
[ -n "${GYRE_CHROMIUM:-}" ] && exit 0
if ! command -v apt-get >/dev/null; then
    echo "please install Chromium, or name one in GYRE_CHROMIUM" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "missing system package. Run: sudo apt-get install -y --no-install-recommends chromium" >&2
    exit 1
fi
echo "installing system package: chromium"
export DEBIAN_FRONTEND=noninteractive
install_log=$(mktemp)
trap 'rm -f "$install_log"' EXIT
install=(apt-get install -y -q --no-install-recommends chromium)
"${install[@]}" >"$install_log" 2>&1 ||
    { apt-get update -q >"$install_log" 2>&1 && "${install[@]}" >"$install_log" 2>&1; } ||
    { tail -n 20 "$install_log" >&2; exit 1; }
