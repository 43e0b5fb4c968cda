#!/usr/bin/env bash
# Run on one node: mode=doctor first, then the application. Arguments after the options go to the application.
#   bash launch/run.sh [--dry-run] [--no-doctor] device=npu placement=fully_async model=qwen35_9b
# As a job of a running Ray cluster (the head's dashboard, see launch/ray_cluster.sh):
#   ray job submit --address http://127.0.0.1:8265 -- bash CHECKOUT/launch/run.sh experiment=npu8_fully_async_9b cluster.address=auto
# PYTHON is the interpreter (default: the checkout's .venv, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
doctor=true
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --no-doctor) doctor=false; shift ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
find_python
source launch/toolkit.sh
# Ray and SGLang keep many sockets and files open.
ulimit -n "$(ulimit -Hn)"
if $doctor; then
  run "$python" -m app "$@" mode=doctor
fi
if $dry_run; then
  run "$python" -m app "$@"
else
  # exec: signals reach the application, and its exit code is the script's.
  exec "$python" -m app "$@"
fi
