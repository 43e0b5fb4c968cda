"""Source code of packages, installed or from a downloaded wheel. It is parsed, never imported."""

import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APP = ROOT / "app"


@dataclass(frozen=True)
class Package:
    """Files of one version of a package. Names are paths relative to site-packages."""

    name: str
    names: tuple[str, ...]
    read: Callable[[str], str]

    def under(self, folder: str, ending: str = ".py") -> Iterator[str]:
        return (name for name in self.names if name.startswith(folder) and name.endswith(ending))

    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.read(path))

    def defines(self, path: str, name: str) -> bool:
        """Whether a module defines a function or class of this name, or imports one under it."""
        for node in ast.walk(self.tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
                return True
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                return True
        return False

    def mentions(self, text: str, folder: str) -> bool:
        return any(text in self.read(path) for path in self.under(folder))


@cache
def installed(module: str) -> Package:
    """The package in this environment. Skips the test if it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{module} is not installed")
    folder = Path(spec.origin).parent
    names = tuple(str(path.relative_to(folder.parent)) for path in folder.rglob("*.py"))
    return Package(module, names, lambda name: (folder.parent / name).read_text())


@cache
def wheel(requirement: str) -> Package:
    """A wheel, downloaded with pip and read as an archive, which stays open when its folder goes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        (file,) = Path(folder).glob("*.whl")
        archive = zipfile.ZipFile(file)
    return Package(requirement, tuple(archive.namelist()), lambda name: archive.read(name).decode())


def metadata(package: Package) -> str:
    (path,) = [name for name in package.names if name.endswith(".dist-info/METADATA")]
    return package.read(path)
