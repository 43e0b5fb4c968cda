#!/usr/bin/env bash
# The first hour on new hardware: doctor, parity, syncs, a killed engine, ten steps; one table and first_hour.json.
#   bash launch/first_hour.sh cuda|npu|cpu [--tiny] [--model FOLDER | --random-weights] [--steps N] [--only CHECK …] [--out FILE]
# --random-weights needs neither network nor weights. PYTHON is the interpreter (default: the checkout's .venv, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
case ${1---help} in
  --help) usage; exit 0 ;;
  cuda | npu | cpu) ;;
  *) fail "device $1 is not known: give cuda, npu or cpu" ;;
esac
find_python
source launch/toolkit.sh
ulimit -n "$(ulimit -Hn)"
exec "$python" -m tests.bench.first_hour "$@"
