#!/usr/bin/env bash
# What a container runs: the toolkit's environment, then the application in place of this shell, so that signals reach it
# and its exit code is the container's.
set -eo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/toolkit.sh"
ulimit -n "$(ulimit -Hn)"
exec python -m app "$@"
