"""Qwen2.5-Coder-0.5B with the two tags of a tool call in reach.

The model writes a call as its template asks, but leaves out `<tool_call>` and `</tool_call>`: their rows are as they
were initialized. Here the rows of the head are fitted to a few calls (a logistic regression over hidden states that
stay as they are), and the rows of the embedding are those of tokens with the same neighbors. All other weights are
the model's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.device.torchvision_shim import transformers

TAGS = ["<tool_call>", "</tool_call>"]
NEIGHBORS = ["json", "```"]  # as in ```json\n{…}\n```
END_OF_CALL = "}}"
DECAY = 1e-6

Messages = Sequence[dict[str, Any]]


def with_tags(source: Path, out: Path, lessons: Sequence[Messages], tools: Any) -> Path:
    """Write the model with fitted rows."""
    tokenizer = transformers().AutoTokenizer.from_pretrained(source)
    model = transformers().AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tags = tokenizer.convert_tokens_to_ids(TAGS)

    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[tags] = embedding[tokenizer.convert_tokens_to_ids(NEIGHBORS)]
        hidden, targets = zip(*_assistant_positions(model, tokenizer, lessons, tools, tags[1]), strict=True)
        head = model.get_output_embeddings().weight
    rows = _fitted(torch.cat(hidden), torch.cat(targets), head.detach(), tags)

    with torch.no_grad():
        head[tags] = rows
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _assistant_positions(
    model: Any, tokenizer: Any, lessons: Sequence[Messages], tools: Any, closing: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hidden states [T, hidden] and the tokens [T] that follow, where the assistant writes."""

    def ids(messages: Messages, prompt: bool) -> list[int]:
        rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, return_dict=True)
        return rendered["input_ids"]

    end = tokenizer(END_OF_CALL, add_special_tokens=False)["input_ids"]
    for lesson in lessons:
        tokens = ids(lesson, prompt=False)
        call, answer = (len(ids(lesson[:turn], prompt=True)) for turn in (1, 3))
        called = len(ids(lesson[:2], prompt=False))
        yield _following(model, tokens, [*range(call, called), *range(answer, len(tokens))])

        close = tokens.index(closing, call)
        bare = [*tokens[: close - 1], *end, closing]
        yield _following(model, bare, range(call, len(bare)))


def _following(model: Any, tokens: list[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    hidden = model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]
    return hidden[[position - 1 for position in positions]], torch.tensor([tokens[each] for each in positions])


def _fitted(hidden: Tensor, targets: Tensor, head: Tensor, tags: list[int]) -> Tensor:
    """Return rows [2, hidden] of the head that minimize the cross entropy, all other rows as they are."""
    logits = hidden @ head.T
    logits[:, tags] = -torch.inf
    others = logits.logsumexp(-1, keepdim=True)
    is_tag = torch.stack([targets == tag for tag in tags], 1)
    of_target = logits.gather(1, targets[:, None])[:, 0]

    rows = head[tags].clone().requires_grad_()
    optimizer = torch.optim.LBFGS([rows], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        of_tags = hidden @ rows.T
        target = torch.where(is_tag.any(1), (of_tags * is_tag).sum(1), of_target)
        value = (torch.cat([others, of_tags], 1).logsumexp(-1) - target).mean() + DECAY * rows.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return rows.detach()
