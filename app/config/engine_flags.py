"""Which flags of SGLang's server are accepted in `rollout.engine_args` and `device.engine_args`.

A flag is refused if training with it would be wrong, or if the installed SGLang does not have it. Its flags are read
from its source, since importing it takes seconds.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from app.config.device import DeviceKind
from app.errors import expect

DECLARED = ("server_args.py", "arg_groups/fields/*.py")  # below sglang/srt
CONTEXT_FLAG = "context-length"  # in tokens, in place of the model's own
FLAG = re.compile(r"--[a-z][\w-]*")
NUMBERS = {"int": int, "float": float}


SEED_42 = "null: a request without a seed of its own then samples with seed 42, so a group is one completion repeated"
REFUSED = {  # with what is accepted, and why; sources: SGLang 0.5.23
    "preferred-sampling-params": "rollout.temperature and rollout.max_completion_tokens: other sampling parameters "
    "would train on log-probabilities that are not those of the sampled tokens",
    "enable-deterministic-inference": SEED_42,  # sampling/sampling_batch_info.py: sampling_seed
    "rl-on-policy-target": SEED_42,
    # layers/quantization/fp8.py: a processed weight has no loader
    "quantization": "null: quantized weights cannot be loaded a second time, which every weight sync does",
    "dtype": "null: device.dtype is that of trainer and engines",
    "random-seed": "null: each engine has one of its own, which follows from seed",
}
TENSOR_PARALLEL = "null: rollout.tensor_parallel, or teacher.devices, is its width"
MODEL = "null: model.path, or teacher.path, names the model"
OWNED = {  # by settings that the rest of the run follows
    "model": MODEL,
    "model-path": MODEL,
    "tp-size": TENSOR_PARALLEL,
    "tensor-parallel-size": TENSOR_PARALLEL,
    "host": "null: the engine's node decides",
    "port": "null: rollout.port is the port of the first engine",
    "api-key": "null: each server gets a key of its own",
}
REFUSED_ON_CPU = {  # speculative/eagle_utils.py: _verify_uses_greedy
    "speculative-algorithm": "null on a CPU: there SGLang accepts the most likely token whatever the temperature, so "
    "nothing is explored",
}

# managers/schedule_batch.py: is_prefill_only
REFUSED_TO_SCORE = {"speculative-algorithm": "null: a teacher samples nothing"}


def check_engine_flags(key: str, flags: Mapping[str, Any], device: DeviceKind, *, scores: bool = False) -> None:
    """Raise `ConfigError` for the first flag that is not accepted.

    Args:
        key: The setting: "rollout.engine_args".
        flags: Its entries. None and False leave a flag out.
        scores: Whether they only score given tokens, with weights of their own.
    """
    refused = REFUSED_TO_SCORE if scores else REFUSED | (REFUSED_ON_CPU if device is DeviceKind.cpu else {})
    refused = refused | OWNED
    for name, value in flags.items():
        known = known_flags()
        shown = f"{key}.{name}"
        expect(not known or name in known, shown, value, "a flag of the installed SGLang, without its dashes")
        if value is None or value is False:
            continue

        expect(name not in refused, shown, value, refused.get(name, ""))
        number = known.get(name, "int" if name == CONTEXT_FLAG else "")
        if number:
            expect(_is_number(value, number), shown, value, "a whole number" if number == "int" else "a number")


@cache
def known_flags() -> Mapping[str, str]:
    """The flags of the installed SGLang: by name the type of those that take a number, else ''. Empty without SGLang.

    >>> known_flags()["context-length"], known_flags()["attention-backend"]
    ('int', '')
    """
    package = find_spec("sglang")
    folders = package.submodule_search_locations if package else None
    if not folders:
        return {}

    found: dict[str, str] = {}
    root = Path(next(iter(folders))) / "srt"
    for pattern in DECLARED:
        for file in root.glob(pattern):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                found.update(_declared(node))
    return found


def _declared(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the flag of a field such as `page_size: A[Optional[int], "help"] = None`, and spelled-out flags."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and FLAG.fullmatch(node.value):
        yield node.value.removeprefix("--"), ""

    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        declared = ast.unparse(node.annotation)
        if not declared.startswith("A[") or "no_cli=True" in declared or "cli_name=" in declared:
            return  # a name of its own is spelled out

        name = node.target.id.replace("_", "-")
        number = re.match(r"A\[(?:Optional\[)?(int|float)\b(?!.*(?:type_parser=(?!human)|nargs=))", declared, re.DOTALL)
        yield name, number[1] if number else ""
        if "BooleanOptionalAction" in declared:
            yield f"no-{name}", ""


def _is_number(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return False
    try:
        NUMBERS[kind](str(value))
    except ValueError:
        return False
    return True
