"""A module imports only from its own package or from floors below, and no imports form a cycle."""

import ast
from collections.abc import Mapping
from pathlib import Path

APP = Path(__file__).parent.parent / "app"
FLOORS = (  # from the ground up; packages of one floor never import each other
    ("types", "errors", "wire", "run_report"),
    ("config", "protocols", "utils"),
    ("stop", "worker"),
    ("algorithm", "data", "device", "environment", "reward", "tracking"),
    ("model",),
    ("rollout", "trainer"),
    ("weight_sync", "offload", "checkpoint", "cluster", "eval"),
    ("recovery",),
    ("placement",),
    ("mode",),
    ("main",),
    ("__main__", "command"),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MAX_FILES = 12  # of a package; `config/` has one for each section
SHARED_NAMES = {  # base names that several packages may use
    "base": "the interface beside its implementations",
    "episode": "the driver's half and the worker's half of an episode",
    "export": "`mode=export` and the exporter of `checkpoint.export`",
    "policy": "the model, and what an environment calls to ask it",
    "handler": "what reward workers and environment workers run",
    "pool": "the driver's engines and its workers",
    "process": "helpers for our own processes, and the process of a worker",
    "remote": "the driver's proxies of an engine, of the trainer and of a worker",
    "wire": "the format of a delta sync and the messages of workers",
}


def module_of(path: Path) -> str:
    """`…/app/trainer/rank.py` → `app.trainer.rank`; a package's `__init__.py` is the package."""
    return ".".join(path.relative_to(APP.parent).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = APP.parent / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(tree: ast.AST) -> set[str]:
    """The modules of `app` that a file imports, also inside functions. `if TYPE_CHECKING:` blocks count too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                found.add(member if node.module.startswith("app") and is_module(member) else node.module)
    return {name for name in found if name.startswith("app.")}


def all_imports() -> dict[str, set[str]]:
    return {module_of(path): imports(ast.parse(path.read_text())) for path in APP.rglob("*.py")}


def violations(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports that climb a floor or cross to another package of the same floor."""
    found = []
    for module, imported in sorted(graph.items()):
        if module == "app":
            continue
        own = module.split(".")[1]
        for other in sorted(imported):
            package = other.split(".")[1]
            if package != own and FLOOR[package] >= FLOOR[own]:
                found.append(f"{module} imports {other}")
    return found


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty when there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if circle := visit(other, [*path, module]):
                return circle
        done.add(module)
        return []

    for module in sorted(graph):
        if circle := visit(module, []):
            return circle
    return []


def test_no_import_climbs_a_floor() -> None:
    assert violations(all_imports()) == []


def test_no_imports_form_a_cycle() -> None:
    assert cycle(all_imports()) == []


def test_every_package_stays_small() -> None:
    files: dict[str, int] = {}
    for path in APP.rglob("*.py"):
        folder = str(path.parent.relative_to(APP))
        files[folder] = files.get(folder, 0) + (path.name != "__init__.py")
    large = {folder: count for folder, count in files.items() if count > MAX_FILES and folder != "config"}
    assert large == {}


def test_a_base_name_stands_in_one_package() -> None:
    packages: dict[str, list[str]] = {}
    for path in APP.rglob("*.py"):
        if path.stem not in ("__init__", "__main__") and path.parent.name != "config":
            packages.setdefault(path.stem, []).append(str(path.parent.relative_to(APP)))
    shared = {name: where for name, where in packages.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert shared == {}


def test_every_section_of_the_configuration_is_a_package_and_a_settings_file() -> None:
    from app.config.run import SECTIONS

    for section in SECTIONS:
        assert (APP / section / "__init__.py").is_file(), section
        assert (APP / "config" / f"{section}.py").is_file(), section


def test_the_rules_find_what_breaks_them() -> None:
    source = (
        "from app.trainer import rank\nfrom app.types import Group\n\ndef late() -> None:\n    import app.mode.train"
    )
    assert imports(ast.parse(source)) == {"app.trainer.rank", "app.types", "app.mode.train"}
    assert violations({"app.rollout.pool": {"app.trainer.rank"}}) == ["app.rollout.pool imports app.trainer.rank"]
    assert violations({"app.model.load": {"app.placement.buffer"}}) == ["app.model.load imports app.placement.buffer"]
    assert violations({"app.placement.colocate": {"app.placement.context", "app.types"}}) == []
    assert cycle({"app.a": {"app.b"}, "app.b": {"app.c"}, "app.c": {"app.a"}}) == ["app.a", "app.b", "app.c", "app.a"]
    assert cycle({"app.a": {"app.b", "app.c"}, "app.b": {"app.c"}}) == []
