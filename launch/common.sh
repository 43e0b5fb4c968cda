# Shared by the scripts of this folder: --help from a script's header, and --dry-run.

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

# The devices of a node as options of `ray start`: ray_resources npu 8
ray_resources() {
  case $1 in
    cpu) echo "--num-cpus=$2" ;;
    cuda) echo "--num-gpus=$2" ;;
    npu) echo "--resources={\"NPU\":$2}" ;;
    *) fail "device $1 is not known: give cpu, cuda or npu" ;;
  esac
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
