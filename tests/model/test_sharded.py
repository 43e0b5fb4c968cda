"""One and two FSDP2 ranks give what a plain module gives."""

from pathlib import Path

import pytest
import torch

from app.model.load import load
from app.model.policy import named_checkpoint_tensors
from tests.model import sharded
from tests.model.support import batch, relative, save_qwen3, weights

KINDS = ("tied", "untied")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save_qwen3(tmp_path_factory.mktemp(kind), tied=kind == "tied") for kind in KINDS]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def results(
    request: pytest.FixtureRequest, paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[sharded.Result]:
    out = tmp_path_factory.mktemp("results") / "results.pt"
    return sharded.run(paths, request.param, out, activation_checkpointing=request.param == 2)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_give_the_same_logprobs_and_gradients_as_a_plain_module(
    kind: str, paths: list[Path], results: list[sharded.Result]
) -> None:
    path, ours = paths[KINDS.index(kind)], results[KINDS.index(kind)]
    policy = load(path, mesh=None, device="cpu")
    given = batch(101)
    logprobs, entropies = policy(**given.inputs, temperature=0.7)
    (logprobs * weights(given)).sum().backward()
    assert relative(ours["logprobs"], logprobs.detach()) < 1e-6
    assert relative(ours["entropies"], entropies) < 1e-6
    plain = dict(named_checkpoint_tensors(policy))
    assert list(plain) == list(ours["tensors"])
    for name, parameter in plain.items():
        assert torch.equal(ours["tensors"][name], parameter.detach()), name
        assert relative(ours["gradients"][name], parameter.grad) < 1e-6, name


def test_a_tied_head_is_one_parameter_and_each_rank_holds_its_rows(results: list[sharded.Result]) -> None:
    tied, untied = results
    assert "lm_head.weight" not in tied["tensors"]
    assert "lm_head.weight" in untied["tensors"]
    assert untied["local_rows"]["lm_head.weight"] in (101, 51)  # of 101: all, or the larger half
