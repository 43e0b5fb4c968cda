"""Settings that refer to environment variables, in the saved configuration of a run.

Numbers and flags are saved resolved. A text may be a secret: its reference is saved, and a salted digest of its value,
which a resume compares.
"""

import json
import secrets
from collections.abc import Collection
from hashlib import scrypt
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from app.errors import ConfigError
from app.tracking.run_folder import CONFIG, flatten
from app.utils.files import replace_file

REFERENCE = "${oc.env:"
DIGESTS = Path(CONFIG) / "environment.json"  # by setting: salt and digest


def save_references(folder: Path, raw: Any, resolved: Any) -> Any:
    """Return resolved settings, but texts that refer to the environment as they were given; save their digests."""
    given, values = flatten(raw), flatten(resolved)
    referring = [key for key, value in given.items() if REFERENCE in json.dumps(value, default=str)]
    kept = {key: _digest(values[key], secrets.token_hex(16)) for key in referring if _is_text(values[key])}
    replace_file(folder / DIGESTS, json.dumps(kept, indent=1))
    return _kept(raw, resolved)


def require_same_environment(saved: DictConfig, folder: Path, changeable: Collection[str]) -> None:
    """Raise `ConfigError` if a setting outside of `changeable` refers to another text than when the run was saved.

    Runs of earlier versions have no digests, and are not compared.
    """
    file = folder / DIGESTS
    digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for key in (key for key in digests if not any(f"{key}.".startswith(f"{name}.") for name in changeable)):
        try:
            now = flatten(OmegaConf.to_container(saved, resolve=True, enum_to_str=True)).get(key)
        except OmegaConfBaseException:  # a variable that is not set
            now = None
        if _digest(now, digests[key].partition(":")[0]) != digests[key]:
            accepted = f"the value that the environment had when the run in {folder} was saved"
            raise ConfigError(key, flatten(saved).get(key), accepted, "its variable has another one now, or none")


def _kept(raw: Any, resolved: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _kept(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [_kept(*pair) for pair in zip(raw, resolved, strict=True)]
    return raw if isinstance(raw, str) and REFERENCE in raw and _is_text(resolved) else resolved


def _is_text(value: Any) -> bool:
    return not isinstance(value, int | float)


def _digest(value: Any, salt: str) -> str:
    text = json.dumps(value, default=str).encode()
    return f"{salt}:{scrypt(text, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16).hex()}"
