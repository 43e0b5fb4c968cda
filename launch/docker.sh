#!/usr/bin/env bash
# Run the image on one node, with devices, shared memory and mounts.
#   bash launch/docker.sh [--dry-run] [--image NAME] [--models DIR] cuda|npu [group=choice] [key=value]
#   bash launch/docker.sh npu device=npu placement=fully_async model=qwen35_9b model.path=/models/Qwen3.5-9B
# Runs are written to ./outputs; the hub cache is ~/.cache/huggingface. NPUS is the number of cards (8).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
image='' models=''
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --image) image=${2-}; shift 2 ;;
    --models) models=${2-}; shift 2 ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
kind=${1-}
[ $# -eq 0 ] || shift
# Host network: HCCL and NCCL between nodes. Host IPC: shared memory between processes.
options=(--rm --init=false --network=host --ipc=host --ulimit nofile=1048576 --ulimit memlock=-1
  --stop-timeout=60 -v "$PWD/outputs:/workspace/outputs" -v "$HOME/.cache/huggingface:/root/.cache/huggingface"
  -e HF_TOKEN -e WANDB_API_KEY)
[ -z "$models" ] || options+=(-v "$models:/models:ro")
case $kind in
  cuda) options+=(--gpus all) ;;
  npu)
    for ((card = 0; card < ${NPUS:-8}; card++)); do options+=(--device="/dev/davinci$card"); done
    options+=(--device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc
      -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro
      -v /etc/ascend_install.info:/etc/ascend_install.info:ro)
    ;;
  *) fail "'$kind' is not accepted: give cuda or npu; --help shows how" ;;
esac
run "${DOCKER:-docker}" run "${options[@]}" "${image:-hydra-posttrain:$kind}" "$@"
