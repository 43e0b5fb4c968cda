"""Flags of SGLang that `*.engine_args` must not have: training would be wrong, or a setting decides them.

Nor flags that the installed SGLang does not have. They are read from its source, since importing it takes seconds. Its
parser completes abbreviations, so those of a flag count as it.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from app.errors import expect

DECLARED = ("server_args.py", "arg_groups/fields/*.py")  # below sglang/srt
FLAG = re.compile(r"--[a-z][\w-]*")
CONTEXT_FLAG = "context-length"  # in tokens, in place of the model's own
NEEDED = ("mem-fraction-static", "max-running-requests", "max-loras-per-batch")  # the plan of memory follows from them
WHOLE = (CONTEXT_FLAG, "max-running-requests", "max-loras-per-batch", "max-total-tokens", "chunked-prefill-size")
STATE_FLAG = "mamba-ssm-dtype"  # of the recurrent states of linear attention
SEED_42 = "null: a request without a seed then samples with seed 42, so a group is one completion repeated"
DRAFTS = "null: rollout.speculative is what drafts"
THRESHOLD = "null: below 1 an engine accepts drafts more often than the policy would sample them"
REFUSED = {  # with what is accepted, and why; sources: SGLang 0.5.23
    "preferred-sampling-params": "rollout.temperature: others change log-probabilities, but not those reported",
    "enable-deterministic-inference": SEED_42,  # sampling/sampling_batch_info.py: sampling_seed
    "rl-on-policy-target": SEED_42,
    # layers/quantization/fp8.py: a processed weight has no loader
    "quantization": "null: quantized weights cannot be loaded a second time, which every weight sync does",
    "dtype": "null: device.dtype is that of trainer and engines",
    "random-seed": "null: each engine has one of its own, which follows from seed",
    "speculative-algorithm": DRAFTS,
    "speculative-draft-model-path": DRAFTS,
    "speculative-accept-threshold-single": THRESHOLD,  # speculative/eagle_utils.py: eagle_sample
    "speculative-accept-threshold-acc": THRESHOLD,
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
# managers/schedule_batch.py: is_prefill_only
REFUSED_TO_SCORE = {"speculative-algorithm": "null: a teacher samples nothing"}


def check_engine_flags(key: str, flags: Mapping[str, Any], *, scores: bool = False) -> None:
    """Raise `ConfigError` for the first flag of `key` that an engine, or one that only `scores`, must not have."""
    refused = (REFUSED_TO_SCORE if scores else REFUSED) | OWNED
    for name, value in flags.items():
        is_known = not known_flags() or any(each.startswith(name) for each in known_flags())
        expect(is_known, f"{key}.{name}", value, "a flag of the installed SGLang, without its dashes")
        left_out = value is None or value is False
        expect(not left_out or name not in NEEDED, f"{key}.{name}", value, "a number")
        if left_out:
            continue
        flag = next((each for each in sorted(refused) if each.startswith(name)), None)
        expect(flag is None, f"{key}.{name}", value, refused.get(flag or "", ""))
        digits = str(value).removeprefix("-" if name == "chunked-prefill-size" else "")
        is_whole = digits.isdecimal() or not any(each.startswith(name) for each in WHOLE)
        expect(is_whole, f"{key}.{name}", value, "a whole number")
        is_number = re.fullmatch(r"\d*\.?\d+", str(value)) or name != "mem-fraction-static"
        expect(bool(is_number), f"{key}.{name}", value, "a number")


@cache
def known_flags() -> frozenset[str]:
    """The flags of the installed SGLang, without dashes; none without SGLang."""
    package = find_spec("sglang")
    roots = [Path(each) / "srt" for each in (package and package.submodule_search_locations) or ()]
    files = [file for root in roots for pattern in DECLARED for file in root.glob(pattern)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return frozenset(flag for tree in trees for node in ast.walk(tree) for flag in _declared(node))


def _declared(node: ast.AST) -> Iterator[str]:
    """Yield the flag of a field such as `page_size: A[Optional[int], "help"] = None`, and spelled-out flags."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and FLAG.fullmatch(node.value):
        yield node.value.removeprefix("--")

    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        declared = ast.unparse(node.annotation)
        if not declared.startswith("A[") or "no_cli=True" in declared or "cli_name=" in declared:
            return  # a name of its own is spelled out
        name = node.target.id.replace("_", "-")
        yield name
        if "BooleanOptionalAction" in declared:
            yield f"no-{name}"
