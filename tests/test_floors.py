"""A module imports only from its own package or from floors below; packages of one floor 2 never know each other."""

import ast
from pathlib import Path

APP = Path(__file__).parent.parent / "app"
FLOOR_2 = {"rollout", "trainer", "weight_sync", "offload", "tracking"}
FLOORS = {
    **dict.fromkeys(["types", "protocols", "errors", "config", "process", "wire"], 0),
    **dict.fromkeys(["algorithm", "reward", "data", "device", "model"], 1),
    **dict.fromkeys(FLOOR_2, 2),
    "placement": 3,
    **dict.fromkeys(["main", "__main__"], 4),
}


def floor(module: str) -> int:
    """`app.trainer.rank` → 2; schemas and package docstrings are floor 0."""
    parts = module.split(".")[1:]
    return 0 if not parts or parts[-1] == "schema" else FLOORS[parts[0]]


def imports(path: Path) -> set[str]:
    """The `app` modules that a file imports at run time; `if TYPE_CHECKING:` blocks import nothing."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_package = (APP.parent / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if is_package else {node.module}
    return {name for name in found if name.startswith("app.")}


def test_no_import_climbs_a_floor() -> None:
    climbing = []
    for path in APP.rglob("*.py"):
        module = ".".join(path.relative_to(APP.parent).with_suffix("").parts).removesuffix(".__init__")
        own = module.split(".")[1] if "." in module else ""
        for imported in imports(path):
            other = imported.split(".")[1]
            same_package = other == own
            siblings = own in FLOOR_2 and other in FLOOR_2 and floor(imported) > 0
            if not same_package and (floor(imported) > floor(module) or siblings):
                climbing.append(f"{module} imports {imported}")
    assert climbing == []


def test_the_floor_rule_sees_the_imports_it_judges() -> None:
    assert "app.trainer.packing" in imports(APP / "trainer" / "step.py")
    assert floor("app.trainer.schema") == 0
    assert floor("app.placement.build") == 3
