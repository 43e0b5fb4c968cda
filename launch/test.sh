#!/usr/bin/env bash
# Create .venv on first use and run the quick tests, in two processes; arguments go to pytest, in one.
#   bash launch/test.sh [-m slow] [tests/rollout]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
if [ "${1-}" = --help ]; then usage; exit 0; fi
bash launch/setup.sh cpu
[ $# -gt 0 ] || set -- -n 2 # tests/parallel.py says who runs what
exec .venv/bin/python -m pytest "$@"
