"""Classes of the trainer ranks that the driver only names."""

import ast
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from app.utils.dotted_path import ByName, LoadError, resolve

APP = Path(__file__).parents[2] / "app"


def test_calling_one_imports_the_class_and_creates_an_instance() -> None:
    counter = ByName("collections.Counter")
    assert counter("abca") == pickle.loads(pickle.dumps(counter))("abca") == Counter(a=2, b=1, c=1)


def test_its_methods_are_known_by_name() -> None:
    assert ByName("collections.Counter").most_common.__name__ == Counter.most_common.__name__


def test_a_class_that_does_not_exist_is_named_where_it_is_called() -> None:
    with pytest.raises(LoadError, match="module collections has no Missing"):
        ByName("collections.Missing")()


def named_classes() -> list[tuple[str, str, str]]:
    """(file, name there, path) of every `name = ByName(path)` in the application."""
    found = []
    for file in sorted(APP.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called, target = node.value.func, node.targets[0]
                if isinstance(called, ast.Name) and called.id == "ByName" and isinstance(target, ast.Name):
                    (path,) = node.value.args
                    found.append((str(file.relative_to(APP)), target.id, ast.literal_eval(path)))
    return found


@pytest.mark.parametrize(("file", "name", "path"), named_classes())
def test_what_is_named_is_the_class_that_type_checkers_see(file: str, name: str, path: str) -> None:
    module, _, attribute = path.rpartition(".")
    assert attribute == name
    assert isinstance(resolve(path), type)
    seen = ast.parse((APP / file).read_text())
    imported = [node for node in ast.walk(seen) if isinstance(node, ast.ImportFrom) and node.module == module]
    assert name in [alias.name for node in imported for alias in node.names]


def test_the_drivers_modules_import_no_torch() -> None:
    modules = "app.cluster.actors, app.mode.session, app.mode.train, app.weight_sync.factory"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
