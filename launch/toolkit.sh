# The accelerator toolkit's environment, where the image has one. Sourced by the entrypoint, and by every other bash in
# a container whose BASH_ENV names this file (Ray's worker pods, whose command is not the entrypoint).
for environment in "${ASCEND_TOOLKIT:-/usr/local/Ascend/ascend-toolkit}/set_env.sh" \
  "${ASCEND_NNAL:-/usr/local/Ascend/nnal/atb}/set_env.sh"; do
  # shellcheck disable=SC1090 # the toolkit's own, known in the image only
  if [ -f "$environment" ]; then source "$environment"; fi
done
unset environment
