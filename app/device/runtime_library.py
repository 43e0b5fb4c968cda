"""The accelerator's runtime library as pip installs it, in a folder that the loader does not search."""

import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libcudart.so.*"
LOADER_PATH = "LD_LIBRARY_PATH"


def library_folders() -> list[str]:
    """Return the folders of pip's runtime libraries; empty on other devices."""
    spec = find_spec("nvidia")
    packages = [] if spec is None else spec.submodule_search_locations or []
    found = (file.parent for package in packages for file in Path(package).glob(f"*/lib/{LIBRARY}"))
    return sorted({str(folder) for folder in found})


def let_the_loader_find_it(environment: MutableMapping[str, str]) -> None:
    """Search pip's folders first in processes that are started from now on.

    The memory saver is preloaded into SGLang's processes and needs the library. Without it the loader ends them.
    """
    inherited = environment.get(LOADER_PATH)
    folders = [*library_folders(), *([inherited] if inherited else [])]
    if folders:
        environment[LOADER_PATH] = os.pathsep.join(folders)
