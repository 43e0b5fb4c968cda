#!/usr/bin/env bash
# Start a Ray cluster by hand: `head` on one node, `worker` on each other node, then the application on a node with devices.
#   bash launch/ray_cluster.sh [--dry-run] --device npu --devices 8 head
#   bash launch/ray_cluster.sh [--dry-run] --device npu --devices 8 worker HEAD_ADDRESS
#   bash launch/run.sh device=npu placement=fully_async model=qwen35_9b cluster.address=HEAD_ADDRESS:6379
#   bash launch/ray_cluster.sh stop        on each node
# The head creates a token on first use, ~/.ray/auth_token. Copy it to the other nodes before they join.
# PORT is the head's port (6379), RAY the ray command (ray).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
device='' devices=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --device) device=${2-}; shift 2 ;;
    --devices) devices=${2-}; shift 2 ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
role=${1-} ray=${RAY:-ray} port=${PORT:-6379}
case $role in
  head | worker)
    [ -n "$device" ] || fail "--device is missing: give cpu, cuda or npu"
    [[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices '$devices' is not accepted: give how many devices this node has"
    resources=$(ray_resources "$device" "$devices")
    # The application sets the visible devices, since a rank and an engine may share a card; Ray must not change them.
    [ "$device" != npu ] || export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
    ulimit -n "$(ulimit -Hn)"
    ray_token "$ray" "$role"
    ;;
esac
case $role in
  head) run "$ray" start --head --port="$port" "$resources" --disable-usage-stats --include-dashboard=false ;;
  worker)
    [ $# -eq 2 ] || fail "worker needs the head's address"
    run "$ray" start --address="$2:$port" "$resources" --disable-usage-stats
    ;;
  stop) run "$ray" stop ;;
  *) fail "'$role' is not accepted: give head, worker or stop; --help shows how" ;;
esac
