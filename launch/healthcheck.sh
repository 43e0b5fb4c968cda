#!/usr/bin/env bash
# Health check of the images: a file of the output folder changed within HEALTH_MINUTES (30).
#   bash launch/healthcheck.sh [FOLDER]
set -euo pipefail
if [ "${1-}" = --help ]; then sed -n '2,3s/^# //p' "$0"; exit 0; fi
folder=${1:-${POSTTRAIN_OUTPUTS:-/workspace/outputs}} minutes=${HEALTH_MINUTES:-30}
if [ -z "$(find "$folder" -type f -mmin "-$minutes" -print -quit)" ]; then
  echo "nothing under $folder was written in the last $minutes minutes" >&2
  exit 1
fi
