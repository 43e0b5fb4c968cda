"""A module imports only from its own package or from floors below; the core can be read without the optional rooms."""

import ast
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

APP = Path(__file__).parent.parent / "app"
FLOORS = (  # from the ground up; packages of one floor never import each other
    ("types", "errors"),
    ("config", "protocols", "utils"),
    ("stop", "worker"),
    ("algorithm", "data", "device", "environment", "reward", "tracking"),
    ("model",),
    ("rollout", "trainer"),
    ("weight_sync", "offload", "checkpoint", "cluster", "eval", "teacher"),
    ("recovery",),
    ("placement",),
    ("start",),
    ("mode",),
    ("main",),
    ("__main__",),
    ("cpu_engine",),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


@dataclass(frozen=True)
class Room:
    """An optional room. A reader of the core may skip it; it may import the core."""

    modules: tuple[str, ...]
    doors: tuple[str, ...]  # modules of the core that import it, in functions

    def holds(self, module: str) -> bool:
        return any(module == each or module.startswith(f"{each}.") for each in self.modules)


ROOMS = {
    "report": Room(("app.mode.report", "app.tracking.report"), ("app.main", "app.tracking.recorder")),
    "plan": Room(("app.mode.plan",), ("app.mode.train", "app.mode.eval")),
    "doctor": Room(("app.mode.doctor",), ()),
    "parity": Room(("app.mode.parity",), ()),
    "verifiers": Room(("app.environment.verifiers",), ()),  # of the kinds of environment, by name
    "openenv": Room(("app.environment.openenv",), ()),
    "OpenAI endpoint": Room(("app.environment.worker.openai_endpoint",), ("app.environment.worker.episode",)),
    "delta sync": Room(
        (
            "app.rollout.engine.sglang_plugin.delta_loader",
            "app.rollout.engine.sglang_plugin.sparse_tensor",
            "app.weight_sync.delta",
            "app.weight_sync.shard_diff",
        ),
        ("app.rollout.engine.sglang_plugin.entry_points", "app.weight_sync.sender"),
    ),
    "dashboards": Room(
        ("app.tracking.clearml", "app.tracking.prometheus", "app.tracking.tensorboard", "app.tracking.wandb"),
        ("app.tracking.dashboards",),
    ),
    "supervised runs": Room(("app.mode.sft", "app.data.demonstrations"), ("app.start.inputs",)),
    "trial of own objectives": Room(("app.algorithm.custom_functions",), ("app.start.input_checks",)),
    "trial of own rewards": Room(("app.reward.tryout",), ("app.start.input_checks",)),
    "teacher": Room(("app.teacher",), ("app.start.session", "app.start.input_checks")),
    "serving of adapters": Room(
        (
            "app.rollout.engine.served_adapters",
            "app.rollout.engine.sglang_plugin.lora_layers",
            "app.weight_sync.adapters",
        ),
        ("app.rollout.engine.host", "app.rollout.engine.sglang_plugin.entry_points", "app.weight_sync.synchronizer"),
    ),
    "rewards that run code": Room(("app.reward.code",), ("app.start.input_checks",)),
    "engines on a CPU": Room(("app.cpu_engine",), ("app.device.cpu",)),
}
SHARED_NAMES = {  # base names that several packages may use
    "base": "the interface beside its implementations",
    "episode": "the driver's half and the worker's half of an episode",
    "export": "`mode=export` and the exporter of `checkpoint.export`",
    "policy": "the model, and what an environment calls to ask it",
    "handler": "what reward workers and environment workers run",
    "pool": "the driver's engines and its workers",
    "process": "helpers for our own processes, and the process of a worker",
    "remote": "the driver's proxies of an engine, of the trainer and of a worker",
    "wire": "the messages of workers, and those of episodes beside them",
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


def imports_at_start(tree: ast.Module) -> set[str]:
    """The modules of `app` that an import of a file imports: neither in functions nor for type checkers alone."""
    statements: list[ast.stmt] = list(tree.body)
    found: list[ast.stmt] = []
    while statements:
        node = statements.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            statements += [*node.body, *node.orelse]
        elif isinstance(node, ast.If):
            statements += node.orelse
        elif isinstance(node, ast.Try):
            statements += [*node.body, *node.orelse, *(each for handler in node.handlers for each in handler.body)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
    return imports(ast.Module(found, []))


def trees() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(path.read_text()) for path in APP.rglob("*.py")}


def all_imports() -> dict[str, set[str]]:
    """By module. Without the doors of optional rooms, which are above the core."""
    found = {module: imports(tree) for module, tree in trees().items()}
    for room in ROOMS.values():
        for door in room.doors:
            found[door] = {each for each in found[door] if not room.holds(each)}
    return found


def room_of(module: str) -> str | None:
    """The optional room that a module belongs to; None: the core."""
    return next((name for name, room in ROOMS.items() if room.holds(module)), None)


def test_no_import_climbs_a_floor_or_crosses_to_another_package_of_the_same_floor() -> None:
    found = []
    for module, imported in sorted(all_imports().items()):
        if module == "app":
            continue
        own = module.split(".")[1]
        for other in sorted(imported):
            package = other.split(".")[1]
            if package != own and FLOOR[package] >= FLOOR[own]:
                found.append(f"{module} imports {other}")
    assert found == []


def test_no_imports_form_a_cycle() -> None:
    TopologicalSorter(all_imports()).prepare()  # raises CycleError with the modules of a circle


def test_the_core_imports_optional_rooms_in_functions_of_their_doors_alone() -> None:
    found = []
    for module, tree in sorted(trees().items()):
        if room_of(module) is not None:
            continue
        at_start = imports_at_start(tree)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        in_functions: set[str] = set().union(*map(imports, functions))
        for other in sorted(imports(tree)):
            name = room_of(other)
            if name is None:
                continue
            if other in at_start:
                found.append(f"{module} imports {other} at its start")
            elif module not in ROOMS[name].doors and other in in_functions:
                found.append(f"{module} imports {other}, but is no door of the room {name}")
    assert found == []


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
