"""Model directories of several families: their markers, and a small vocabulary of byte pairs.

The templates in `templates/` are those of the checkpoints: SmolLM2-135M-Instruct, Qwen2.5-0.5B-Instruct (Apache-2.0),
GLM-4.5, DeepSeek-R1-Distill-Qwen and Phi-3-mini (MIT); all but the first in the copies that TRL 1.16.0 ships. That of
Llama is written here, with the markers and the tool calls of Llama 3.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.environment.qwen import TEMPLATES, byte_pairs

LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
TOOL_CALL, THINK = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


@dataclass(frozen=True)
class Family:
    """A chat format."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str = ""
    call: str = ""
    syntax: str | None = None


def _file(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
FAMILIES = {
    "smollm2": Family(_file("smollm2"), CHATML, ("<|im_end|>",)),
    "qwen2.5": Family(_file("qwen2_5"), CHATML, ("<|im_end|>",), TOOL_CALL, call=JSON_CALL, syntax="qwen3"),
    "llama3": Family(
        LLAMA,
        ("<|begin_of_text|>", *HEADERS),
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
        call='{"name": "add", "parameters": {"a": 1}}',
        syntax="llama-3",
    ),
    "glm4.5": Family(
        _file("glm4moe"),
        GLM,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        (*TOOL_CALL, *THINK, *ARGUMENTS),
        call=GLM_CALL,
        syntax="glm-4.5",
    ),
    "phi3": Family(
        _file("phi3"),
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
        ("<|end|>", "<|endoftext|>"),
    ),
    "r1": Family(_file("deepseek_r1_distill"), DEEPSEEK, DEEPSEEK[:1], THINK, bos=DEEPSEEK[1]),
}


def write_family(folder: Path, family: Family) -> Path:
    """Write the files of a model directory that rendering reads."""
    from tokenizers import AddedToken

    folder.mkdir(parents=True, exist_ok=True)
    backend = byte_pairs([family.template, "assistant\n user\n system\n .\n\n !\n\n\n"], 600)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    backend.save(str(folder / "tokenizer.json"))

    config = {"model_type": "of_a_test", "eos_token_id": [backend.token_to_id(stop) for stop in family.stops]}
    declared = {"eos_token": family.stops[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**declared, "bos_token": family.bos} if family.bos else declared)
    )
    (folder / "chat_template.jinja").write_text(family.template)
    return folder


def by_transformers(folder: Path) -> Any:
    """The tokenizer of a directory as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)
