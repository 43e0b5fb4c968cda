#!/usr/bin/env bash
# Create .venv on first use (Python 3.11 or 3.12, pip) and train: bash launch/quickstart.sh [group=choice] [key=value]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh cpu
exec .venv/bin/python -m app "$@"
