"""The JSON schema of a Python function, from its type hints and Google-style docstring, and the check of arguments."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
ACCEPTED = "str, int, float, bool, None, Any, list, dict, Literal, or a union of them"
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class SchemaError(Exception):
    """A function cannot be a tool. The message names the parameter."""


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's entry in OpenAI's `tools`. Raises `SchemaError` for a parameter without a JSON type hint."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a hint is any expression
        raise SchemaError(f"its type hints cannot be read ({error})") from error

    summary, described = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in KINDS:
            raise SchemaError(f"its parameter {parameter} has no name by which a model could give it")
        if parameter.name not in hints:
            raise SchemaError(f"its parameter {parameter.name} has no type hint")

        found = _type_schema(hints[parameter.name], parameter.name)
        if parameter.name in described:
            found["description"] = described[parameter.name]
        properties[parameter.name] = found
        if parameter.default is parameter.empty:
            required.append(parameter.name)

    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into what the tool does, in one line, and its arguments."""
    sections = SECTION.split(text)
    summary = " ".join(sections[0].split())
    described: dict[str, str] = {}
    for title, body in zip(sections[1::2], sections[2::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = ""
        for line in inspect.cleandoc("\n" + body).splitlines():
            if match := ARGUMENT.match(line):
                name = match[1]
                described[name] = match[2]
            elif name and line.strip():
                described[name] += " " + line.strip()
    return summary, described


def _type_schema(hint: Any, parameter: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if origin is typing.Annotated:
        return _type_schema(arguments[0], parameter)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(argument, parameter) for argument in arguments]}
    if hint is list or origin is list:
        return {"type": "array", "items": _type_schema(arguments[0], parameter) if arguments else {}}
    if hint is dict or origin is dict:
        return {"type": "object"}
    shown = getattr(hint, "__name__", str(hint))
    raise SchemaError(f"its parameter {parameter} has the type {shown}, which has no JSON form: give {ACCEPTED}")


def checked(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as the function takes them.

    A string stands for the value it spells where the schema wants none: "5" for an integer.

    Raises:
        ValueError: What is wrong with the arguments, for the policy to read.
    """
    parameters = schema["function"]["parameters"]
    properties, required = parameters["properties"], parameters["required"]
    takes = ", ".join(f"{name} ({_shown(found)})" for name, found in properties.items()) or "no arguments"

    if missing := [name for name in required if name not in arguments]:
        raise ValueError(f"the argument {missing[0]} is missing; it takes {takes}")
    if unknown := [name for name in arguments if name not in properties]:
        raise ValueError(f"there is no argument {unknown[0]}; it takes {takes}")
    return {name: _fitting(properties[name], value, name) for name, value in arguments.items()}


def _fitting(schema: Mapping[str, Any], value: Any, name: str) -> Any:
    if _fits(schema, value):
        return value
    if isinstance(value, str):
        try:
            spelled = json.loads(value)
        except (ValueError, RecursionError):
            spelled = value
        if _fits(schema, spelled):
            return spelled
    raise ValueError(f"the argument {name} must be {_shown(schema)}, not {json.dumps(value, default=str)[:100]}")


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    if "anyOf" in schema:
        return any(_fits(branch, value) for branch in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(choice) and value == choice for choice in schema["enum"])

    kind = schema.get("type")
    if isinstance(kind, list):
        return any(_fits({**schema, "type": each}, value) for each in kind)
    if kind == "array":
        if not isinstance(value, list):
            return False
        first = schema.get("prefixItems", [])  # of a tuple
        rest = [schema.get("items") or {}] * (len(value) - len(first))
        return len(value) >= len(first) and all(map(_fits, [*first, *rest], value))
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    accepted: dict[str | None, type] = {"string": str, "boolean": bool, "null": type(None), "object": dict}
    return isinstance(value, accepted.get(kind, object))


def _shown(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_shown(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice) for choice in schema["enum"])
    return str(schema.get("type", "any value"))
