#!/usr/bin/env bash
# Entry point of the images: load the toolkit's environment, then replace this shell with the application, so that signals
# reach it and its exit code is the container's.
set -eo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/toolkit.sh"
ulimit -n "$(ulimit -Hn)"
# PYTHON, else that of the checkout's .venv, else that of the image
python=${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}
if [ -z "${PYTHON-}" ] && [ ! -x "$python" ]; then python=python; fi
exec "$python" -m app "$@"
