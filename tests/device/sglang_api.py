"""API of a version of SGLang, read from its source: server flags, routes, and fields of request bodies."""

import ast
from functools import cache

from tests.device.packages import Package

SERVER_ARGS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/"  # flags of newer versions
HTTP = "sglang/srt/entrypoints/http_server.py"
BODIES = "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"


@cache
def flags(package: Package) -> set[str]:
    """Names of server flags, without the dashes: dataclass fields, and literals passed to the parser."""
    names: set[str] = set()
    for path in [SERVER_ARGS, *package.under(FIELDS)]:
        for node in ast.walk(package.tree(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id.replace("_", "-"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                names.add(node.value.removeprefix("--"))
    return names


@cache
def routes(package: Package) -> dict[str, str | None]:
    """Route → class of its request body, or None if it has none."""
    bodies: dict[str, str | None] = {}
    for node in ast.walk(package.tree(HTTP)):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant)):
                continue
            route = decorator.args[0].value
            if isinstance(route, str) and route.startswith("/"):
                bodies[route] = _body(node)
    return bodies


def _body(handler: ast.AsyncFunctionDef) -> str | None:
    """The first class of io_struct in the annotations of a handler's parameters."""
    for argument in handler.args.args:
        for node in ast.walk(argument.annotation) if argument.annotation else ():
            if isinstance(node, ast.Name) and node.id.endswith(("ReqInput", "AbortReq", "GenerateReqInput")):
                return node.id
    return None


@cache
def fields(package: Package, name: str, path: str = BODIES) -> set[str]:
    """Fields of a dataclass or struct, including those of its bases in the same module."""
    classes = {node.name: node for node in ast.walk(package.tree(path)) if isinstance(node, ast.ClassDef)}
    names: set[str] = set()
    pending = [name]
    while pending:
        node = classes.get(pending.pop())
        if node is None:
            continue
        pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names.add(statement.target.id)
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                names |= {argument.arg for argument in [*statement.args.args, *statement.args.kwonlyargs]}
    return names
