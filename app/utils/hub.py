"""The Hugging Face hub's client: without log lines of its own, and without retries where there is no network."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.errors import ConfigError, one_line

PROBE_TIMEOUT_S = 5.0
LIBRARIES = ("huggingface_hub", "datasets")  # log each retry of each file, twice: also to a handler of their own
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.py", "README.md", "LICENSE*"]


@contextmanager
def hub_client() -> Iterator[bool]:
    """Use `huggingface_hub` and `datasets` quietly; yields whether the hub answers. If not, they use their caches."""
    from huggingface_hub import constants

    online = _answers()
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    # modules that hold a switch for offline mode, read at each request
    modules = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    switches: list[Any] = [] if online else modules
    before = [switch.HF_HUB_OFFLINE for switch in switches]

    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield online
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def cached_file(hub_id: str, name: str, revision: str | None) -> Path | None:
    """Return a file of a hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, name, revision=revision)
    except HFValidationError:  # a path
        return None
    return Path(found) if isinstance(found, str) else None


def download_model(hub_id: str, revision: str | None) -> Path:
    """Return the directory of a hub model, downloaded or in the cache. Raises `ConfigError` with `model.path`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with hub_client() as online:
        try:
            folder = snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=HUB_FILES,
                ignore_patterns=["consolidated*", "original/*"],  # the same weights under other names
                local_files_only=not online,
            )
            return Path(folder)
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            pinned = f" with model.revision={revision}" if revision is not None else ""
            why = one_line(error).rstrip(".")
            accepted = f"a directory that exists or the id of a hub model that can be reached from here ({why})"
            if not online:
                accepted = "a directory that exists: the hub cannot be reached from here, and its cache does not hold "
                accepted += "this model; download it where there is a network"
            raise ConfigError("model.path", f"{hub_id}{pinned}", accepted) from error


def _answers() -> bool:
    """Whether the hub answers one request, with any status."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception:  # of the HTTP library, which differs between versions
        return False
    return True
