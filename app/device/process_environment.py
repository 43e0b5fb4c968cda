"""Environment variables of processes on an accelerator: options of torch's allocator, and the loader's search path."""

import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

LIBRARY = "libcudart.so.*"
LOADER_PATH = "LD_LIBRARY_PATH"
EXPANDABLE = "expandable_segments"  # an option in PYTORCH_CUDA_ALLOC_CONF


def library_folders() -> list[str]:
    """Return the folders of pip's runtime libraries, which the loader does not search; empty on other devices."""
    spec = find_spec("nvidia")
    packages = [] if spec is None else spec.submodule_search_locations or []
    found = (file.parent for package in packages for file in Path(package).glob(f"*/lib/{LIBRARY}"))
    return sorted({str(folder) for folder in found})


def prepend_library_folders(environment: MutableMapping[str, str]) -> None:
    """Search pip's folders first in processes that are started from now on.

    The memory saver is preloaded into SGLang's processes and needs the library. Without it the loader ends them.
    """
    inherited = environment.get(LOADER_PATH)
    folders = [*library_folders(), *([inherited] if inherited else [])]
    if folders:
        environment[LOADER_PATH] = os.pathsep.join(folders)


def without_expandable_segments(options: str) -> str:
    """Return the options without the one for expandable segments.

    >>> without_expandable_segments("expandable_segments:True,max_split_size_mb:64")
    'max_split_size_mb:64'
    """
    return ",".join(option for option in options.split(",") if not option.strip().startswith(EXPANDABLE))


def expandable_segments_off(options: str) -> str:
    """Return the options with expandable segments off.

    >>> expandable_segments_off("expandable_segments:True,max_split_size_mb:64"), expandable_segments_off("")
    ('max_split_size_mb:64,expandable_segments:False', 'expandable_segments:False')
    """
    others = without_expandable_segments(options)
    return ",".join(option for option in (others, f"{EXPANDABLE}:False") if option)
