# Shared by the scripts of this folder: --help from a script's header, --dry-run, the interpreter, and what a run needs.

dry_run=false

# Print the comment at the top of the calling script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}" | sed '/^set /d'
}

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# Run a command; with --dry-run print it.
run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# Set `python`: PYTHON, else that of the checkout's .venv, else python3. Set `ray`: RAY, else the one beside it, else ray.
# shellcheck disable=SC2034 # read by the scripts
find_python() {
  python=${PYTHON:-$PWD/.venv/bin/python}
  if [ -z "${PYTHON-}" ] && [ ! -x "$python" ]; then python=python3; fi
  ray=${RAY:-$(dirname "$python")/ray}
  if [ -z "${RAY-}" ] && [ ! -x "$ray" ]; then ray=ray; fi
}

# Set `device` and `devices`, the kind and the number that the settings compose to: compose device=npu model=qwen35_9b
# A setting that is not accepted ends the script with the application's sentence. Needs no accelerator and no torch.
# shellcheck disable=SC2034 # read by the scripts
compose() {
  local plan
  plan=$("$python" -m app "$@" mode=plan) || exit 2
  read -r devices device < <(sed -n 's/^[^ ].* on \([0-9]*\) \([a-z]*\) device(s)$/\1 \2/p' <<< "$plan") ||
    fail "the plan of these settings names no devices: $*"
}

# Set `paths`, those that the settings name as they compose, one setting=path a line: local_paths IMAGE data.path=rows.jsonl
# A machine that has only Docker composes in the image.
# shellcheck disable=SC2034 # read by the scripts
local_paths() {
  local image=$1
  shift
  if [ -z "$image" ] || "$python" -c 'import hydra, yaml' 2> /dev/null; then
    paths=$("$python" launch/local_paths.py "$@") || exit 2
  else
    paths=$("${DOCKER:-docker}" run --rm -i --entrypoint python "$image" - "$@" < launch/local_paths.py) || exit 2
  fi
}

# Export what Ray's processes need on a node: node_environment npu
node_environment() {
  source launch/toolkit.sh
  # The application sets the visible devices, since a rank and an engine may share a card; Ray must not change them.
  [ "$1" != npu ] || run export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
  # Ray and SGLang keep many sockets and files open.
  ulimit -n "$(ulimit -Hn)"
}

# Set `resources`, a node's devices and CPUs as options of `ray start`: ray_resources npu 8 [64]
# Without a number of CPUs, Ray counts those of the machine.
ray_resources() {
  local cpus=${3-}
  case $1 in
    cpu) resources=() cpus=${cpus:-$2} ;;
    cuda) resources=("--num-gpus=$2") ;;
    npu) resources=("--resources={\"NPU\":$2}") ;;
    *) fail "device $1 is not known: give cpu, cuda or npu" ;;
  esac
  [ -z "$cpus" ] || resources+=("--num-cpus=$cpus")
}

# Require the token that the nodes of a cluster share (~/.ray/auth_token); create it on the head: ray_token ray head
# Without a token anyone on the network could run code in the cluster.
ray_token() {
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  if [ "$RAY_AUTH_MODE" != token ] || [ -n "${RAY_AUTH_TOKEN-}" ] || [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
    return
  fi
  [ "$2" = head ] || fail "this node has no token: copy ~/.ray/auth_token from the head (or RAY_AUTH_MODE=disabled on all)"
  if $dry_run; then run "$1" get-auth-token --generate; else "$1" get-auth-token --generate > /dev/null; fi
}
