"""What torch_npu puts in the place of functions of torch.distributed, and our calls of those functions.

The signatures of three versions are recorded in `torch_npu_signatures.json`, since the wheels are large and do not
import without their toolkit. A slow test derives them again.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.device.packages import APP, Package

RECORDED = Path(__file__).with_name("torch_npu_signatures.json")
VERSIONS = ("torch_npu==2.10.0.post7", "torch_npu==2.13.0", "torch_npu==2.14.0")
PATCHES = "torch_npu/_init/patches/distributed_patches.py"
IMPLEMENTATIONS = "torch_npu/distributed/distributed_c10d.py"
PREFIX = "torch.distributed.distributed_c10d."


def recorded() -> dict[str, dict[str, list[str]]]:
    """Version → replaced function → names of its parameters."""
    return json.loads(RECORDED.read_text())


def signatures(package: Package) -> dict[str, list[str]]:
    """Replaced function → names of its parameters, as the source of torch_npu says."""
    functions = {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in package.tree(IMPLEMENTATIONS).body
        if isinstance(node, ast.FunctionDef)
    }
    replaced = dict(_aliases(package)) | dict(_assignments(package))
    return {name: functions[source] for name, source in sorted(replaced.items()) if source in functions}


def _aliases(package: Package) -> Iterator[tuple[str, str]]:
    """(function, its replacement) of the table of public functions."""
    for node in package.tree(PATCHES).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC_API_ALIASES":
            for target, source in ast.literal_eval(node.value):
                yield target.rpartition(".")[2], source.rpartition(".")[2]


def _assignments(package: Package) -> Iterator[tuple[str, str]]:
    """(function, its replacement) of assignments to a function of torch."""
    for node in package.tree(IMPLEMENTATIONS).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(PREFIX):
            yield ast.unparse(node.targets[0]).removeprefix(PREFIX), ast.unparse(node.value)


def our_calls() -> dict[str, set[str]]:
    """Function of torch.distributed → the keywords that we pass, with `#n` for n positional arguments."""
    calls: dict[str, set[str]] = defaultdict(set)
    for path in sorted(APP.rglob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed")
            for alias in node.names
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            module, _, name = ast.unparse(call.func).rpartition(".")
            if module == "dist" or (not module and name in imported):
                calls[name] |= {f"#{len(call.args)}", *(each.arg for each in call.keywords if each.arg)}
    return dict(calls)


def misfits(signatures: dict[str, list[str]]) -> dict[str, list[str]]:
    """Function → what we pass that its replacement does not take."""
    found: dict[str, list[str]] = {}
    for name, passed in our_calls().items():
        if name in signatures:
            parameters = signatures[name]
            most = max(int(each[1:]) for each in passed if each.startswith("#"))
            unknown = sorted({each for each in passed if not each.startswith("#")} - set(parameters))
            if unknown or most > len(parameters):
                found[name] = unknown or [f"{most} arguments"]
    return found
