#!/usr/bin/env bash
# Entry point of the images: load the toolkit's environment, then replace this shell with the application, so that signals
# reach it and its exit code is the container's.
set -eo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/toolkit.sh"
ulimit -n "$(ulimit -Hn)"
exec python -m app "$@"
