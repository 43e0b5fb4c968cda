"""Engine and trainer compute what transformers computes for real pretrained models, in float32.

SmolLM2 (llama, 30 layers, a tied head) and Qwen2.5-Coder (qwen2, 24 layers, biases, an untied head), from a short
question to contexts of 4,000 tokens.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.device.torchvision_shim import transformers
from app.mode.parity import CPU, logprobs_of, packed
from app.model.hf_directory import load_tokenizer
from app.model.load import load
from app.model.policy import named_trained_tensors
from app.rollout.engine.remote import RemoteEngine
from app.types import Completion, FinishReason, GroupRequest
from tests.folders import ROOT
from tests.real_models import MAKE_S, real_model
from tests.rollout.support import host_spec, remote, request, server_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKE_S + 1200)]

MEAN_ROUNDING = 1e-4  # nats a token
LARGEST_ROUNDING = 2e-3
GRADIENT_ROUNDING = 1e-3  # |difference| / |reference| of a tensor
NAMES = ["smollm2", "qwen25"]
QUESTION = "Tom has 12 apples and buys 30 more. How many apples does he have now?"
TEXT = (ROOT / "docs" / "placements.md", ROOT / "docs" / "environments.md", ROOT / "docs" / "configuration.md")


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Path:
    return real_model(request.param)


@pytest.fixture(scope="module")
def text(model: Path) -> np.ndarray:
    """The tokens of pages of the documentation, more than 4,000."""
    tokenizer = load_tokenizer(model)
    return np.array(tokenizer.encode("\n".join(path.read_text() for path in TEXT)), dtype=np.int32)


@pytest.fixture(scope="module")
def engine(ray_session: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    folder, name = tmp_path_factory.mktemp("real"), f"engine of {model.name}"
    server = server_spec(model, folder, name=name)
    made = remote(host_spec(folder, name=name, server=server, start_timeout_s=600, stall_timeout_s=600))
    asyncio.run(made.start(600))
    yield made
    asyncio.run(made.stop())


def reference(model: Path, *, gradients: bool = False) -> Any:
    policy = transformers().AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return policy.train(gradients)


def logprobs(policy: Any, prompt: np.ndarray, completion: np.ndarray) -> Tensor:
    """The log-probabilities of a completion, [T], one sequence and no packing."""
    tokens = torch.as_tensor(np.concatenate([prompt, completion]), dtype=torch.int64)
    logits = policy(input_ids=tokens[None], use_cache=False, logits_to_keep=len(completion) + 1).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[len(prompt) :, None]).squeeze(1)


def requests_of(model: Path, text: np.ndarray) -> list[GroupRequest]:
    tokenizer = load_tokenizer(model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return [
        request("real/0@0", tokens=tuple(chat), group_size=8, max_tokens=64),
        request("real/1@0", tokens=tuple(text[:1000]), group_size=4, max_tokens=32),
        request("real/2@0", tokens=tuple(text[:4000]), group_size=2, max_tokens=32),
    ]


def test_an_engine_samples_with_the_logprobs_of_transformers(
    engine: RemoteEngine, model: Path, text: np.ndarray
) -> None:
    requests = requests_of(model, text)

    async def sample() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(each) for each in requests))

    groups = asyncio.run(sample())
    policy = reference(model)
    for given, group in zip(requests, groups, strict=True):
        with torch.no_grad():
            expected = [logprobs(policy, given.token_ids, each.token_ids).numpy() for each in group]
            shifted = logprobs(policy, given.token_ids, np.roll(group[0].token_ids, 1)).numpy()
        differences = np.abs(np.concatenate(expected) - np.concatenate([each.logprobs for each in group]))
        assert differences.mean() < MEAN_ROUNDING, given.prompt_id
        assert differences.max() < LARGEST_ROUNDING, given.prompt_id
        assert np.abs(shifted - group[0].logprobs).mean() > 0.1, given.prompt_id


def test_the_trainer_computes_the_gradients_of_transformers(model: Path, text: np.ndarray) -> None:
    """A policy gradient over three packed sequences; transformers computes them one by one."""
    pairs = [
        (text[start : start + prompt], text[start + prompt : start + prompt + completion])
        for start, prompt, completion in [(0, 20, 40), (500, 100, 60), (1500, 3, 30)]
    ]
    weights = np.array([1.0, -0.5, 2.0])

    policy = reference(model, gradients=True)
    for (prompt, completion), weight in zip(pairs, weights, strict=True):
        (-weight * logprobs(policy, prompt, completion).sum()).backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    del policy

    ours = load(model, mesh=None, device=CPU, trust_remote_code=False)
    batch = packed([(prompt, sampled(completion)) for prompt, completion in pairs], CPU, advantages=weights)
    (-(batch.advantages[batch.sequence] * logprobs_of(ours, batch)).sum()).backward()

    compared = 0
    for name, parameter in named_trained_tensors(ours):
        assert parameter.grad is not None, name
        difference = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert difference < GRADIENT_ROUNDING, (name, float(difference))
        compared += 1
    assert compared == len(expected)


def sampled(tokens: np.ndarray) -> Completion:
    return Completion(tokens, np.zeros(len(tokens), dtype=np.float32), FinishReason.stop, spans=())
