#!/usr/bin/env bash
# KubeRay: apply the job of launch/kubernetes/ with the settings, devices and nodes of a run.
#   bash launch/kubernetes.sh [--dry-run] [--name NAME] [--image IMAGE] [--claim CLAIM] [--secret SECRET] [--node DIR] experiment=...
# --dry-run prints the manifest. The run is named and kept in /storage/outputs/NAME of the volume claim; applied again under
# the same name, it continues. SECRET holds what the run may need of HF_TOKEN, WANDB_API_KEY, CLEARML_API_*, HTTPS_PROXY, ...
# What settings name is in the claim, or in a folder that all nodes have: --node DIR mounts it, read-only, at the same place.
# DEVICES is the number per node (8), CPUS and MEMORY are those of a node (64, 512Gi), RESOURCE is the name that the device
# plugin gives to its devices. PYTHON is the interpreter that composes (default: the checkout's .venv, else python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
folders=() name='' image='' claim=posttrain-storage secret=posttrain-secrets
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --name) name=${2-}; shift 2 ;;
    --image) image=${2-}; shift 2 ;;
    --claim) claim=${2-}; shift 2 ;;
    --node) folders+=("$(realpath -m -- "${2-}")"); shift 2 ;;
    --secret) secret=${2-}; shift 2 ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
find_python
composed=() # without what only the volume has
for setting in "$@"; do
  case $setting in
    model.path=/* | teacher.path=/*) composed+=("${setting%%=*}=on/the-volume") ;;
    model.lora.path=/* | model.chat_template=/* | rollout.speculative=/*) ;;
    *) composed+=("$setting") ;;
  esac
done
compose "${composed[@]}"
local_paths '' "$@"
while IFS= read -r setting; do
  reached=false
  for folder in /storage /workspace "${folders[@]}"; do
    case ${setting#*=}/ in "$folder"/*) reached=true ;; esac
  done
  case $setting in
    *path=/*) $reached || fail "$setting is in no pod: give a path in /storage, the volume claim, or --node a folder of it" ;;
  esac
done <<< "$paths"
[ -f "launch/kubernetes/rayjob_$device.yaml" ] || fail "device=$device has no job here: give cuda or npu"

# All nodes are alike: the first is Ray's head, the others its workers.
most=${DEVICES:-8}
nodes=$(((devices + most - 1) / most))
per_node=$((devices < most ? devices : most))
manifest=$(cat "launch/kubernetes/rayjob_$device.yaml")
replace() {
  manifest=${manifest//"$1"/"$2"}
}
replace "posttrain-$device" "${name:-posttrain-$device}" # before the image, which may have this name in it
replace '"8"' "\"$per_node\""
replace '\"NPU\": 8' "\\\"NPU\\\": $per_node"
replace "replicas: 0" "replicas: $((nodes - 1))"
replace "minReplicas: 0" "minReplicas: $((nodes - 1))"
replace "maxReplicas: 8" "maxReplicas: $((nodes > 1 ? nodes - 1 : 1))"
replace 'cpu: "64"' "cpu: \"${CPUS:-64}\""
replace "memory: 512Gi" "memory: ${MEMORY:-512Gi}"
replace "hydra-posttrain:$device" "${image:-hydra-posttrain:$device}"
replace posttrain-storage "$claim"
replace posttrain-secrets "$secret"
number=0
for folder in "${folders[@]}"; do
  number=$((number + 1))
  replace '- {name: shared-memory, mountPath' "- {name: node-$number, mountPath: \"$folder\", readOnly: true}
                - {name: shared-memory, mountPath"
  replace '            # shared memory between' "            - {name: node-$number, hostPath: {path: \"$folder\"}}
            # shared memory between"
done
[ -z "${RESOURCE-}" ] || replace huawei.com/Ascend910 "$RESOURCE"
replace "experiment=${device}8_fully_async_9b" "$(printf '%q ' "$@")"
if $dry_run; then
  echo "$manifest"
else
  kubectl apply -f - <<< "$manifest"
fi
