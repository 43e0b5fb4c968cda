# Load the accelerator toolkit's environment, if the image has one. Sourced by the entry point, and by every bash of a
# container whose BASH_ENV names this file (Ray's worker pods, which do not run the entry point).
for environment in "${ASCEND_TOOLKIT:-/usr/local/Ascend/ascend-toolkit}/set_env.sh" \
  "${ASCEND_NNAL:-/usr/local/Ascend/nnal/atb}/set_env.sh"; do
  # shellcheck disable=SC1090 # part of the toolkit; exists in the image only
  if [ -f "$environment" ]; then source "$environment"; fi
done
unset environment
