"""A small Qwen3 with a chat template, as a model directory, that was taught to say a few things in a chat."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from app.device.torchvision_shim import transformers
from app.environment.rendering import Renderer, renderer_for
from tests.environment.qwen import tokenizer, write_model

POSITIONS = 2048
GOAL = 0.02  # mean loss of a sampled token: three of four calls are said as they were taught
MAX_STEPS = 1000
END = "<|im_end|>"

Lesson = tuple[list[int], list[bool]]
"""The tokens of a sequence, and which of them the policy says."""


def write_policy(folder: Path, lessons: Callable[[Renderer], Sequence[Lesson]]) -> Path:
    """Write a model directory of a Qwen3 with two layers in float32."""
    write_model(folder, "qwen3")
    renderer = renderer_for("chat", str(folder))

    eos, pad = (tokenizer().token_to_id(token) for token in (END, "<|endoftext|>"))
    config = transformers().Qwen3Config(
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers().Qwen3ForCausalLM(config)
    _teach(model, lessons(renderer))
    model.generation_config = transformers().GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    model.save_pretrained(folder)

    template = (folder / "chat_template.jinja").read_text()
    fast = transformers().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token=END, pad_token="<|endoftext|>", model_max_length=POSITIONS
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def conversation(renderer: Renderer, messages: Sequence[dict[str, Any]], tools: Any = None) -> Lesson:
    """The sequence of a conversation in which the assistant's messages are what the policy says, the stop token too."""
    tokens: list[int] = []
    said: list[bool] = []
    new: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            new.append(message)
            continue
        appended = renderer.following(tokens, new, tools) if tokens else renderer.opening(new, tools)
        assert appended is not None
        sampled = tokenizer().encode(message["content"] + END, add_special_tokens=False).ids
        tokens += [*appended, *sampled]
        said += [False] * len(appended) + [True] * len(sampled)
        new = []
    return tokens, said


def _teach(model: Any, lessons: Sequence[Lesson]) -> None:
    """Train until what is said has a loss of `GOAL`. Takes seconds."""
    longest = max(len(tokens) for tokens, _ in lessons)
    ids = torch.zeros(len(lessons), longest, dtype=torch.int64)
    mask = torch.zeros(len(lessons), longest, dtype=torch.bool)
    for row, (tokens, said) in enumerate(lessons):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = torch.tensor(said)

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(MAX_STEPS):
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])
        if loss.item() < GOAL:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the lessons were not learned: loss {loss.item():.2f}")
