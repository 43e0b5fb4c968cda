#!/usr/bin/env bash
# Sets up .venv on first use and runs the tests; arguments go to pytest: bash launch/test.sh [-m soak] [tests/rollout]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh cpu
exec .venv/bin/python -m pytest "$@"
