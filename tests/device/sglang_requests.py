"""Our use of SGLang, read from our own source, so that it cannot go stale: requests, sampling fields, imports."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.device.packages import APP

CALLERS = (APP / "rollout", APP / "weight_sync")
CALLS = {"update", "_post", "control", "post", "get", "healthy"}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in CALLERS:
        for path in sorted(folder.rglob("*.py")):
            yield path, ast.parse(path.read_text())


def requests() -> dict[str, set[str]]:
    """Route → the fields that we send, if they are in the call or in a dictionary literal of the same function."""
    sent: dict[str, set[str]] = defaultdict(set)
    for _, tree in _trees():
        for route, keys in _transports(tree):
            sent[route] |= keys
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            dictionaries = _dictionaries(function)
            for call in ast.walk(function):
                called = _route(call)
                if called is not None:
                    assert isinstance(call, ast.Call)
                    sent[called] |= {key for argument in call.args[1:] for key in _keys(argument, dictionaries)}
    return dict(sent)


def _transports(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Classes that name their call as `route = "..."`, with the fields that their `ask` returns."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        routes = [
            part.value.value
            for part in node.body
            if isinstance(part, ast.Assign)
            and isinstance(part.targets[0], ast.Name)
            and part.targets[0].id == "route"
            and isinstance(part.value, ast.Constant)
        ]
        asks = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "ask"]
        for route in routes:
            returned = [each.value for ask in asks for each in ast.walk(ask) if isinstance(each, ast.Return)]
            yield f"/{route!s}", {key for body in returned if body is not None for key in _keys(body, {})}


def _route(call: ast.AST) -> str | None:
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS):
        return None
    if not (call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)):
        return None
    value = call.args[0].value
    if value.startswith("/"):
        return value
    return f"/{value}" if call.func.attr == "update" and value.isidentifier() else None


def _dictionaries(function: ast.AST) -> dict[str, set[str]]:
    """Name → the keys of the dictionary literal it is assigned, with those set later by `name["key"] = ...`."""
    keys: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(function):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
            keys[target.id] |= _keys(node.value, {})
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            keys[target.value.id] |= set(_strings([target.slice]))
    return keys


def _keys(argument: ast.expr, dictionaries: Mapping[str, set[str]]) -> set[str]:
    if isinstance(argument, ast.Name):
        return dictionaries.get(argument.id, set())
    return set(_strings(argument.keys)) if isinstance(argument, ast.Dict) else set()


def _strings(nodes: Iterable[ast.expr | None]) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def sampling_fields() -> set[str]:
    """The keys of the dictionaries under `sampling_params`."""
    for _, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "sampling_params":
                    return {
                        inner.value
                        for each in ast.walk(value)
                        if isinstance(each, ast.Dict)
                        for inner in each.keys
                        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
                    }
    return set()


def imports(package: str) -> set[tuple[str, str]]:
    """(module, name) of all our imports from a package."""
    return {
        (node.module, alias.name)
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package
        for alias in node.names
    }
