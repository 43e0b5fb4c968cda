"""A library that is preloaded finds pip's runtime library, through the loader's own search."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.device.process_environment import library_folders, prepend_library_folders


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with the runtime library where pip puts it, and a library that needs it."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    runtime = folder / "libcudart.so.13"
    source = tmp_path / "source.cpp"
    source.write_text('extern "C" int runtime_answer() { return 13; }\n')
    build = ["g++", "-shared", "-fPIC", str(source)]
    subprocess.run([*build, "-Wl,-soname,libcudart.so.13", "-o", str(runtime)], check=True)

    needing = tmp_path / "needing.cpp"
    needing.write_text('extern "C" int runtime_answer(); extern "C" int needing() { return runtime_answer(); }\n')
    options = ["-shared", "-fPIC", str(needing), str(runtime), "-o", str(tmp_path / "libpreloaded.so")]
    subprocess.run(["g++", *options], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def answer(site: Path, environment: dict[str, str]) -> int:
    """The exit code of a process that calls the preloaded library."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).needing())"
    command = [sys.executable, "-I", "-c", code, str(site / "libpreloaded.so")]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode


def test_the_runtime_library_is_found_in_pips_folder(site: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/somewhere/else"}
    assert answer(site, environment) == 1  # the loader does not find it
    prepend_library_folders(environment)
    assert environment["LD_LIBRARY_PATH"] == f"{site / 'nvidia/cu13/lib'}{os.pathsep}/somewhere/else"
    assert answer(site, environment) == 13


def test_other_devices_keep_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.device.process_environment.find_spec", lambda _: None)
    environment: dict[str, str] = {}
    prepend_library_folders(environment)
    assert (library_folders(), environment) == ([], {})
