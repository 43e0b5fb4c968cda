# Sourced by the scripts of this folder: create .venv from the pinned requirements of a device; again when they change.
#   source launch/setup.sh cpu

requirements=launch/requirements/$1
wanted=$(cat "$requirements".txt "$requirements"-no-deps.txt pyproject.toml launch/setup.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/installed 2>/dev/null || true)" != "$wanted" ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else 1)' || {
    echo "launch/setup.sh: $python is $("$python" --version 2>&1); Python 3.11 or 3.12 is needed (set PYTHON=...)" >&2
    exit 2
  }
  echo "Setting up .venv for $1 (once; some minutes and 3 GB) ..." >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
  "${pip[@]}" install -r "$requirements".txt
  # These packages require the accelerator stack, which a CPU does not have.
  "${pip[@]}" install --no-deps -r "$requirements"-no-deps.txt
  "${pip[@]}" install --no-deps --editable .
  echo "$wanted" > .venv/installed
fi
