#!/usr/bin/env bash
# Create .venv on first use and run the tests; arguments go to pytest.
#   bash launch/test.sh [-m slow] [tests/rollout]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
if [ "${1-}" = --help ]; then usage; exit 0; fi
bash launch/setup.sh cpu
exec .venv/bin/python -m pytest "$@"
