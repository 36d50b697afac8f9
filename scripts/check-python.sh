#!/usr/bin/env bash
# check-python.sh PYTHON: stop with one clear line unless PYTHON is 3.11 or newer.
set -euo pipefail
python=${1:-}
[ -n "$python" ] || { echo "Gyre needs Python 3.11 or newer; none was found. Install it, or say: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Gyre needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Say: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
}
