"""What a version of SGLang offers, read from its source: flags, routes, fields of request bodies."""

import ast
from functools import cache

from tests.device.packages import Package

SERVER_ARGS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/"  # newer versions declare flags there
HTTP = "sglang/srt/entrypoints/http_server.py"
BODIES = "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"


@cache
def flags(package: Package) -> set[str]:
    """Names of server flags, without the dashes: declared as fields, or given to the parser as they are."""
    found: set[str] = set()
    for path in [SERVER_ARGS, *package.under(FIELDS)]:
        for node in ast.walk(package.tree(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id.replace("_", "-"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                found.add(node.value.removeprefix("--"))
    return found


@cache
def routes(package: Package) -> dict[str, str | None]:
    """Route → class of its body, None where it has none."""
    found: dict[str, str | None] = {}
    for node in ast.walk(package.tree(HTTP)):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Call) and decorator.args and isinstance(decorator.args[0], ast.Constant)):
                continue
            first = decorator.args[0].value
            if isinstance(first, str) and first.startswith("/"):
                found[first] = _body(node)
    return found


def _body(handler: ast.AsyncFunctionDef) -> str | None:
    """The first class of io_struct among the annotations of a handler's parameters."""
    for argument in handler.args.args:
        for node in ast.walk(argument.annotation) if argument.annotation else ():
            if isinstance(node, ast.Name) and node.id.endswith(("ReqInput", "AbortReq", "GenerateReqInput")):
                return node.id
    return None


@cache
def fields(package: Package, name: str, path: str = BODIES) -> set[str]:
    """Fields of a dataclass or struct, with those of its bases in the same module."""
    classes = {node.name: node for node in ast.walk(package.tree(path)) if isinstance(node, ast.ClassDef)}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        node = classes.get(waiting.pop())
        if node is None:
            continue
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                found |= {argument.arg for argument in [*part.args.args, *part.args.kwonlyargs]}
    return found
