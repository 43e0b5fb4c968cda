#!/usr/bin/env bash
# Create .venv on first use (Python 3.11 or 3.12, pip) and train on this CPU.
#   bash launch/quickstart.sh [group=choice] [key=value]
# All groups and settings: .venv/bin/python -m app --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
if [ "${1-}" = --help ]; then usage; exit 0; fi
bash launch/setup.sh cpu
exec .venv/bin/python -m app "$@"
