# Sourced by the scripts beside it: --help from a script's own header, and --dry-run.

dry_run=false

# Prints the comment at the top of the calling script.
usage() {
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}" | sed '/^set /d'
}

fail() {
  echo "$(basename "$0"): $1" >&2
  exit 2
}

# Runs a command, or only shows it.
run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# Ray's name of the resource of a device kind, as options of `ray start`: ray_resources npu 8
ray_resources() {
  case $1 in
    cpu) echo "--num-cpus=$2" ;;
    cuda) echo "--num-gpus=$2" ;;
    npu) echo "--resources={\"NPU\":$2}" ;;
    *) fail "device $1 is not known: give cpu, cuda or npu" ;;
  esac
}

# Nodes of a cluster share a token (~/.ray/auth_token), or anyone in the network could run code in it: ray_token ray head
ray_token() {
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  if [ "$RAY_AUTH_MODE" != token ] || [ -n "${RAY_AUTH_TOKEN-}" ] || [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
    return
  fi
  [ "$2" = head ] || fail "this node has no token: copy ~/.ray/auth_token from the head (or RAY_AUTH_MODE=disabled on all)"
  if $dry_run; then run "$1" get-auth-token --generate; else "$1" get-auth-token --generate > /dev/null; fi
}
