#!/usr/bin/env bash
# One node: checks the machine with mode=doctor, then runs. Everything after the options goes to the application.
#   bash launch/run.sh [--dry-run] [--no-doctor] device=npu placement=fully_async model=qwen35_9b
# PYTHON says which interpreter (the checkout's .venv where there is one, else python3).
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
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3
ulimit -n "$(ulimit -Hn)" # Ray and SGLang keep many sockets and files open
if $doctor; then
  run "$python" -m app "$@" mode=doctor
fi
if $dry_run; then
  run "$python" -m app "$@"
else
  exec "$python" -m app "$@" # signals reach the application, its exit code is ours
fi
