#!/usr/bin/env bash
# Create .venv from the pinned requirements of a device; update it when they change.
#   bash launch/setup.sh [--dry-run] cpu|cuda|npu
# cuda needs the driver, and nvcc of CUDA 13: SGLang compiles kernels on first use.
# npu needs CANN, git, curl and unzip. CHIP is a3 (default) or 910b. The versions are those of Dockerfile.npu; a variable of
# the same name replaces one (KERNELS_TAG=...).
# TORCH_INDEX_URL is the index of torch's CPU builds: on x86-64 npu needs it, and cpu takes several GB more without it.
# PYTHON is the interpreter, 3.11 or 3.12 (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/common.sh
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
device=${1-} requirements=launch/requirements packages=.venv/npu
case $device in
  cpu | cuda | npu) ;;
  *) fail "'$device' is not accepted: give cpu, cuda or npu; --help shows how" ;;
esac

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else 1)' ||
  fail "$python is $("$python" --version 2>&1); Python 3.11 or 3.12 is needed (set PYTHON=...)"

# The arguments of Dockerfile.npu, except those that the environment has.
npu_versions() {
  local line name
  while read -r line; do
    name=${line%%=*}
    [ -n "${!name-}" ] || export "${line?}"
  done < <(sed -n 's/^ARG \([A-Z_]*=..*\)/\1/p' Dockerfile.npu)
  PYTHON_VERSION=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  export PYTHON_VERSION
}

install() {
  $dry_run || echo "  installing ${*: -1}" >&2
  run .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile "$@"
}

install_cpu() {
  if [ -n "${TORCH_INDEX_URL-}" ]; then
    install --index-url "$TORCH_INDEX_URL" "$(grep '^torch==' "$requirements/cpu.txt")"
  fi
  install -r "$requirements/cpu.txt"
  # These packages require the accelerator stack, which a CPU does not have.
  install --no-deps -r "$requirements/cpu-no-deps.txt"
  run .venv/bin/python launch/torchvision_operators.py
}

install_cuda() {
  install -r "$requirements/cuda.txt"
}

install_npu() {
  npu_versions
  [ -n "${TORCH_INDEX_URL-}" ] || [ "$(uname -m)" != x86_64 ] ||
    fail "set TORCH_INDEX_URL to the index of torch's CPU builds, which torch_npu needs on x86-64"
  local torch=("torch==$TORCH_VERSION" "torchvision==$TORCHVISION_VERSION")
  local options=()
  if $dry_run; then options=(--dry-run); fi
  bash launch/npu_packages.sh "${options[@]}" "$packages"

  install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "${torch[@]}"
  # Every later install keeps the torch that torch_npu was built for, and numpy.
  local pins=("${torch[@]}" "torch_npu==$TORCH_NPU_VERSION" "transformers==$TRANSFORMERS_VERSION")
  pins+=("$(grep '^numpy==' "$requirements/npu.txt")")
  $dry_run || printf '%s\n' "${pins[@]}" > "$packages/constraints.txt"
  local wheels=("$packages"/wheels/*.whl)
  install -c "$packages/constraints.txt" "torch_npu==$TORCH_NPU_VERSION" "${wheels[@]}"
  install -c "$packages/constraints.txt" "$packages/sglang/python[srt_npu]"
  install -c "$packages/constraints.txt" -r "$requirements/npu.txt"
  # On x86-64 xgrammar requires mainline Triton, whose files replace those of triton-ascend: these come back last.
  run .venv/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes triton
  install --force-reinstall --no-deps "$packages"/wheels/triton_ascend*.whl
  run .venv/bin/python -c "from triton._C.libtriton import ascend; import datasets, pyarrow"
}

sources=(pyproject.toml launch/setup.sh launch/torchvision_operators.py "$requirements/$device"*.txt)
[ "$device" != npu ] || sources+=(Dockerfile.npu launch/npu_packages.sh)
wanted="$device $(cat "${sources[@]}" | sha256sum | cut -d' ' -f1)"
present=$(cat .venv/installed 2> /dev/null || true)
[ "$present" != "$wanted" ] || exit 0
case $present in
  *" "*)
    [ "${present%% *}" = "$device" ] ||
      fail "the .venv here is for ${present%% *}: use .venv/bin/python, or remove .venv to install for $device"
    ;;
esac

echo "Setting up .venv for $device (once; some minutes and several GB) ..." >&2
# --clear: an attempt that was interrupted leaves a Python without pip
.venv/bin/python -m pip --version > /dev/null 2>&1 || run "$python" -m venv --clear .venv
"install_$device"
install --no-deps --editable .
run .venv/bin/python -m compileall -qq -j 0 .venv/lib || true # on all cores, unlike pip; some files are of other Pythons
$dry_run || echo "$wanted" > .venv/installed
