"""Settings that refer to environment variables, in the saved configuration of a run.

Numbers and flags are saved resolved. A text may be a secret: its reference is saved, and a salted digest of what it
referred to, which a resume compares. So what a resumed run trains with cannot change with the environment.
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


def kept_references(raw: Any, resolved: Any) -> Any:
    """Return resolved settings, but texts that refer to environment variables as they were given."""
    if isinstance(raw, dict):
        return {key: kept_references(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [kept_references(*pair) for pair in zip(raw, resolved, strict=True)]
    return raw if isinstance(raw, str) and REFERENCE in raw and isinstance(resolved, str) else resolved


def save_digests(folder: Path, kept: Any, resolved: Any) -> None:
    """Write the digests of settings that are saved as references."""
    values = flatten(resolved)
    digests = {
        key: _digest(values[key], secrets.token_hex(16)) for key, value in flatten(kept).items() if _refers(value)
    }
    replace_file(folder / DIGESTS, json.dumps(digests, indent=1))


def require_same_environment(saved: DictConfig, folder: Path, changeable: Collection[str]) -> None:
    """Raise `ConfigError` if a setting outside of `changeable` refers to another text than when the run was saved.

    Runs of earlier versions have no digests, and are not compared.
    """
    file = folder / DIGESTS
    digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    raw = flatten(OmegaConf.to_container(saved, resolve=False, enum_to_str=True))
    for key, digest in digests.items():
        if any(key == name or key.startswith(f"{name}.") for name in changeable) or key not in raw:
            continue
        try:
            now = flatten(OmegaConf.to_container(saved, resolve=True, enum_to_str=True))[key]
            same = _digest(now, digest.partition(":")[0]) == digest
        except OmegaConfBaseException:  # a variable that is not set
            same = False
        if not same:
            accepted = f"the value that the environment had when the run in {folder} was saved"
            raise ConfigError(key, raw[key], accepted, "its variable has another one now, or none")


def _refers(value: Any) -> bool:
    return REFERENCE in (value if isinstance(value, str) else json.dumps(value, default=str))


def _digest(value: Any, salt: str) -> str:
    text = json.dumps(value, default=str).encode()
    return f"{salt}:{scrypt(text, salt=salt.encode(), n=2**14, r=8, p=1, dklen=16).hex()}"
