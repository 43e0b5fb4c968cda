# Load the accelerator toolkit's environment, if the machine has one. Sourced by the entry point and the launch scripts, and
# by every bash of a container whose BASH_ENV names this file (Ray's worker pods, which do not run the entry point).
# ASCEND_ROOT is where Ascend's packages are: CANN is in cann/, in ascend-toolkit/ before CANN 9.
options=$-
set +eu # the toolkit's scripts read variables that may be unset
for environment in "${ASCEND_ROOT:-/usr/local/Ascend}"/{cann,ascend-toolkit}/set_env.sh; do
  # shellcheck disable=SC1090 # part of the toolkit; exists in the image only
  if [ -f "$environment" ]; then source "$environment"; break; fi
done
for environment in "${ASCEND_ROOT:-/usr/local/Ascend}"/{nnal/atb,cann/share/info/ascendnpu-ir/bin}/set_env.sh; do
  # shellcheck disable=SC1090
  if [ -f "$environment" ]; then source "$environment"; fi
done
case $options in *e*) set -e ;; esac
case $options in *u*) set -u ;; esac
unset environment options
