"""Compiles the stand-in device with g++, once per torch, Python and source, into a folder of the temporary one."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "npu_standin"
FOLDER = Path(__file__).parent
SECONDS = 240


def built() -> Path:
    """Return the library, compiled if it is not there. Ranks that start together compile once."""
    sources = b"".join(path.read_bytes() for path in sorted([*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")]))
    key = hashlib.sha256(sources + torch.__version__.encode() + sys.version.encode()).hexdigest()[:12]
    cache = Path(tempfile.gettempdir()) / NAME
    library = cache / f"{key}.so"

    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    flags = ("-std=c++20", "-O0", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}")
    command = ["g++", *flags, str(FOLDER / "standin.cpp")]
    command += [f"-I{folder}" for folder in headers] + [f"-L{folder}" for folder in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(unfinished)]
    subprocess.run(command, check=True, timeout=SECONDS)
    unfinished.rename(library)
