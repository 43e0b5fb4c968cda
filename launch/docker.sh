#!/usr/bin/env bash
# Run the image on one node, with devices, shared memory, mounts, and the keys of trackers and hubs.
#   bash launch/docker.sh [--dry-run] [--image NAME] [--models DIR] [--mount DIR] [--code DIR] cuda|npu [group=choice] [key=value]
#   bash launch/docker.sh npu device=npu placement=fully_async model=qwen35_9b model.path=/data/models/Qwen3.5-9B
# Files and folders that the settings name, as they compose, are mounted, read-only, at the same place. PYTHON is the
# interpreter that composes (default: the checkout's .venv, else python3, else that of the image).
# --mount DIR mounts a folder at the same place, for reading and writing, such as that of hydra.run.dir; --code DIR does so
# read-only and puts it on Python's path: your rewards, environments and data functions. --models DIR is /models. All but
# --image may be repeated.
# Runs are written to ./outputs; the hub cache is HF_HOME (~/.cache/huggingface). What is compiled stays in the volumes
# hydra-posttrain-cuda-... or -npu-... NPUS is the number of NPUs, from 0 on: by default all of this machine, which are 16 on
# Atlas A3. DCMI is where the library of npu-smi is (/usr/local/dcmi).
# Passed by name, never by value: HF_*, WANDB_*, CLEARML_*, proxies, NCCL_*, HCCL_*, GLOO_*, SGLANG_*; ~/.netrc and ~/clearml.conf.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
image='' code='' mounts=() writable=(/workspace/outputs)
# Mount a path of the caller at another place or, without one, at its own, and set `from` to it: mount PATH [PLACE] [ro]
mount() {
  from=$(cd "$caller" && realpath -e -- "$1" 2> /dev/null) || fail "'$1' is not here"
  local volume=$from:${2:-$from}${3:+:$3}
  case " ${mounts[*]-} " in *" -v $volume "*) ;; *) mounts+=(-v "$volume") ;; esac # Docker refuses a place that is named twice
}
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --image) image=${2-}; shift 2 ;;
    --models) mount "${2-}" /models ro; shift 2 ;;
    --mount) mount "${2-}"; writable+=("$from"); shift 2 ;;
    --code) mount "${2-}" '' ro; code+=${code:+:}$from; shift 2 ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
# Whether a folder of the container outlives it.
outlives() {
  local folder
  for folder in "${writable[@]}"; do
    case $1/ in "$folder"/*) return 0 ;; esac
  done
  return 1
}

kind=${1-} caches=(.cache .triton .tilelang)
[ $# -eq 0 ] || shift

# Host network: HCCL and NCCL between nodes. Host IPC: shared memory between processes.
options=(--rm --init=false --network=host --ipc=host --ulimit nofile=1048576 --ulimit memlock=-1
  --stop-timeout=60 -v "$PWD/outputs:/workspace/outputs")
case $kind in
  cuda) options+=(--gpus all) ;;
  npu)
    caches+=(atc_data)
    nodes=(/dev/davinci[0-9]*) count=8 dcmi=${DCMI:-/usr/local/dcmi}
    [ ! -e "${nodes[0]}" ] || count=${#nodes[@]}
    for ((card = 0; card < ${NPUS:-$count}; card++)); do options+=(--device="/dev/davinci$card"); done
    options+=(--device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc
      -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro
      -v /etc/ascend_install.info:/etc/ascend_install.info:ro)
    [ ! -d "$dcmi" ] || options+=(-v "$dcmi:/usr/local/dcmi:ro")
    ;;
  *) fail "'$kind' is not accepted: give cuda or npu; --help shows how" ;;
esac

# What compilers and SGLang keep: FlashInfer, SGLang's JIT and torch's in .cache; Triton, TileLang; CANN's operators.
for cache in "${caches[@]}"; do
  options+=(-v "hydra-posttrain-$kind-${cache#.}:/root/$cache")
done
options+=(-v "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" -e TORCHINDUCTOR_CACHE_DIR=/root/.cache/inductor)

for setting in "$@"; do
  path=${setting#*=}
  case $setting in
    hydra.run.dir=* | hydra.sweep.dir=* | resume=*/*)
      case $path in /*) ;; *) path=/workspace/$path ;; esac
      outlives "$path" || fail "$setting would end with the container: give a folder of outputs/, or --mount one"
      # What the health check looks at. An evaluation of a run (mode=eval resume=...) has a folder of its own in outputs/.
      if [[ $path/ != /workspace/outputs/* && $path != *'$'* && ($setting != resume=* || "$*" != *mode=*) ]]; then
        options+=(-e "POSTTRAIN_OUTPUTS=${path%%/checkpoints/*}")
      fi
      ;;
  esac
done
find_python
local_paths "${image:-hydra-posttrain:$kind}" "$@"
while IFS= read -r setting; do
  path=${setting#*=}
  case $setting in
    resume=* | *=/models/* | *=/workspace/*) ;;
    *path=/*) # one that is not here can only be of an image of the user's own
      if [ -e "$path" ] || [ -z "$image" ]; then mount "$path" "$path" ro; fi
      ;;
    *=/*) [ ! -e "$path" ] || mount "$path" "$path" ro ;;
    *path=?*) # a hub's id, or a file of the caller
      [ ! -e "$caller/$path" ] || mount "$path" "$(realpath -m "/workspace/$path")" ro
      ;;
  esac
done <<< "$paths"

for file in .netrc clearml.conf; do
  [ ! -f "$HOME/$file" ] || options+=(-v "$HOME/$file:/root/$file:ro")
done
# Those that name a place on this machine stay here.
while read -r name; do
  case $name in
    *_HOME | *_DIR | *_CACHE | *_FILE | *_PATH) ;;
    HF_* | WANDB_* | CLEARML_* | NCCL_* | HCCL_* | GLOO_* | SGLANG_* | *_proxy | *_PROXY | POSTTRAIN_*_KEY) options+=(-e "$name") ;;
    ASCEND_USE_FIA | CPU_AFFINITY_CONF | HEALTH_MINUTES | PYTORCH_NPU_ALLOC_CONF | TASK_QUEUE_ENABLE) options+=(-e "$name") ;;
  esac
done < <(compgen -e)
[ -z "$code" ] || options+=(-e "PYTHONPATH=$code")
run "${DOCKER:-docker}" run "${options[@]}" "${mounts[@]}" "${image:-hydra-posttrain:$kind}" "$@"
