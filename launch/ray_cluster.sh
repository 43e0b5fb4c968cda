#!/usr/bin/env bash
# Start a Ray cluster by hand: `head` on one node, `worker` on each other node, then the application on a node with devices.
#   bash launch/ray_cluster.sh [--dry-run] [--dashboard] --device npu --devices 8 head
#   bash launch/ray_cluster.sh [--dry-run] --device npu --devices 8 worker HEAD_ADDRESS
#   bash launch/run.sh device=npu placement=fully_async model=qwen35_9b cluster.address=HEAD_ADDRESS:6379
#   bash launch/ray_cluster.sh stop        on each node
# The head creates a token on first use, ~/.ray/auth_token. Copy it to the other nodes before they join.
# --dashboard starts Ray's dashboard on 127.0.0.1:8265 (DASHBOARD_PORT), which `ray job submit` needs, see launch/run.sh.
# PORT is the head's port (6379), CPUS the CPUs of this node (default: all). PYTHON is the interpreter (default: the
# checkout's .venv, else python3), RAY the ray command (default: the one beside it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
device='' devices='' dashboard=(--include-dashboard=false)
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --dashboard) dashboard=(--include-dashboard=true "--dashboard-port=${DASHBOARD_PORT:-8265}"); shift ;;
    --device) device=${2-}; shift 2 ;;
    --devices) devices=${2-}; shift 2 ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
role=${1-} port=${PORT:-6379}
find_python
case $role in
  head | worker)
    [ -n "$device" ] || fail "--device is missing: give cpu, cuda or npu"
    [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices '$devices' is not accepted: give how many devices this node has"
    ray_resources "$device" "$devices" "${CPUS-}"
    node_environment "$device"
    # `ray job stop` kills a job after 3 seconds by default; a run needs time to save.
    export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-120}
    ray_token "$ray" "$role"
    ;;
esac
case $role in
  head) run "$ray" start --head --port="$port" "${resources[@]}" --disable-usage-stats "${dashboard[@]}" ;;
  worker)
    [ $# -eq 2 ] || fail "worker needs the head's address"
    run "$ray" start --address="$2:$port" "${resources[@]}" --disable-usage-stats
    ;;
  stop) run "$ray" stop ;;
  *) fail "'$role' is not accepted: give head, worker or stop; --help shows how" ;;
esac
