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
