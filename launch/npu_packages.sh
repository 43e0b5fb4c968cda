#!/usr/bin/env bash
# Fetch what Ascend needs and package indexes do not have: SGLang's source, and the wheels of its kernels and of Triton.
#   bash launch/npu_packages.sh [--dry-run] FOLDER      writes FOLDER/sglang and FOLDER/wheels
# The versions are variables, the arguments of Dockerfile.npu. Needs git, curl and unzip.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
while [ $# -gt 0 ]; do
  case $1 in
    --help) usage; exit 0 ;;
    --dry-run) dry_run=true; shift ;;
    --*) fail "$1 is not an option; --help shows them" ;;
    *) break ;;
  esac
done
[ $# -eq 1 ] || fail "give the folder to write to; --help shows how"
folder=$1 py=${PYTHON_VERSION//./} machine=$(uname -m)
run mkdir -p "$folder/wheels"
if [ ! -e "$folder/sglang" ]; then
  run git clone --quiet --depth 1 --branch "$SGLANG_TAG" "$SGLANG_SOURCE" "$folder/sglang.tmp"
  run mv "$folder/sglang.tmp/python/pyproject_npu.toml" "$folder/sglang.tmp/python/pyproject.toml"
  # memfabric-zbal 1.1.2 (SGLang #38437) has no wheel for Python 3.12; SGLang imports it for SGLANG_ZBAL_LOCAL_MEM_SIZE alone.
  run sed -i '/"memfabric-zbal[^"]*"/d' "$folder/sglang.tmp/python/pyproject.toml"
  run mv "$folder/sglang.tmp" "$folder/sglang"
fi
if ! $dry_run; then
  needed=$(sed -n 's/^ *"transformers==\([^"]*\)".*/\1/p' "$folder/sglang/python/pyproject.toml")
  [ "${needed:-$TRANSFORMERS_VERSION}" = "$TRANSFORMERS_VERSION" ] ||
    fail "SGLang $SGLANG_TAG needs transformers $needed on NPUs: set TRANSFORMERS_VERSION=$needed"
fi

# Download a file of a release: download FILE URL
download() {
  run curl --fail --silent --show-error --location --retry 3 -o "$1" "$2" ||
    fail "$2 cannot be downloaded: look up the names of that release, and set the versions"
}

# The release also holds deep_ep and attention kernels, which a dense model does not use.
kernels=sgl-kernel-npu-$KERNELS_TAG-torch$TORCH_VERSION-py$py-cann$CANN_VERSION-$CHIP-$machine.zip
download "$folder/kernels.zip" "$KERNELS_SOURCE/releases/download/$KERNELS_TAG/$kernels"
run unzip -o -q -j "$folder/kernels.zip" '*sgl_kernel_npu*.whl' '*torch_memory_saver*.whl' -d "$folder/wheels"
run rm "$folder/kernels.zip"

triton=triton_ascend-$TRITON_VERSION-cp$py-cp$py-manylinux_2_27_$machine.manylinux_2_28_$machine.whl
download "$folder/wheels/$triton" "$TRITON_SOURCE/releases/download/v$TRITON_VERSION/$triton"
