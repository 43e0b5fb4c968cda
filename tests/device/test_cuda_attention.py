"""The fastest implementation of FlashAttention is used, among those that equal torch's default one on every rank."""

from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from app.device import cuda
from app.device.cuda import DEFAULT, activate_flash_attention
from tests.trainer.ranks import run_on

HEADS = (32, 8, 128)
Implementations = dict[str, Any]  # a factor of the default result and milliseconds, or an exception


class Switch:
    """torch's switch, with implementations that give a factor of the default result in some milliseconds, or raise."""

    def __init__(self, **implementations: Any) -> None:
        self.implementations: Implementations = {DEFAULT: (1.0, 3.0), **implementations}
        self.active = DEFAULT
        self.timed: list[str] = []

    def activate(self, name: str) -> None:
        found = self.implementations.get(name, ImportError(f"no {name}"))
        if isinstance(found, Exception):
            raise found
        self.active = name

    def restore(self) -> None:
        self.active = DEFAULT

    def outputs(self, heads: cuda.Heads) -> list[torch.Tensor]:
        return [torch.linspace(-1, 1, heads[2]) * self.implementations[self.active][0]]

    def time(self, _heads: cuda.Heads) -> float:
        self.timed.append(self.active)
        return float(self.implementations[self.active][1])

    def install(self, patch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> "Switch":
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        patch.setattr(nn.attention, "activate_flash_attention_impl", self.activate, raising=False)
        patch.setattr(nn.attention, "restore_flash_attention_impl", self.restore, raising=False)
        patch.setattr(cuda, "_outputs", self.outputs)
        patch.setattr(cuda, "_time", self.time)
        return self


@pytest.mark.parametrize(
    ("implementations", "used", "timed"),
    [
        ({"FA4": (1.0, 2.0), "FA3": (1.0, 1.0)}, "FA3", True),
        ({"FA4": (1.0, 1.0), "FA3": (1.0, 2.0)}, "FA4", True),
        ({"FA4": (1.0, 4.0), "FA3": (1.0, 5.0)}, DEFAULT, True),
        ({"FA3": (1.01, 1.0)}, "FA3", True),  # not exactly equal: another order of summation
        ({"FA4": (1.1, 1.0), "FA3": (1.0, 2.0)}, "FA3", True),
        ({"FA4": (1.1, 1.0)}, DEFAULT, False),
        ({"FA4": (float("nan"), 1.0)}, DEFAULT, False),
        ({"FA4": RuntimeError("no backward for this head")}, DEFAULT, False),
        ({}, DEFAULT, False),
    ],
)
def test_the_fastest_kernels_that_equal_the_default_are_used(
    implementations: Implementations, used: str, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed where the default alone works."""
    switch = Switch(**implementations).install(monkeypatch)
    assert activate_flash_attention(HEADS) == used
    assert (switch.active, bool(switch.timed)) == (used, timed)


@pytest.mark.parametrize("capability", [(8, 0), (12, 0), None], ids=["8", "12", "a torch without the switch"])
def test_other_cards_and_an_older_torch_keep_the_default(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = Switch(FA4=(1.0, 1.0)).install(monkeypatch, capability or (9, 0))
    if capability is None:
        monkeypatch.delattr(nn.attention, "activate_flash_attention_impl")
    assert activate_flash_attention(HEADS) == DEFAULT
    assert (switch.active, switch.timed) == (DEFAULT, [])


def chosen_by(_mesh: Any, by_rank: tuple[Implementations, ...]) -> list[str]:
    rank, used = torch.distributed.get_rank(), [""] * len(by_rank)
    with pytest.MonkeyPatch.context() as patch:
        switch = Switch(**by_rank[rank]).install(patch)
        activate_flash_attention(HEADS)
    torch.distributed.all_gather_object(used, switch.active)
    return used


@pytest.mark.parametrize(
    ("first", "second", "used"),
    [
        ({"FA4": (1.0, 1.0), "FA3": (1.0, 1.1)}, {"FA4": (1.0, 1.3), "FA3": (1.0, 1.2)}, "FA3"),
        ({"FA4": (1.0, 1.0), "FA3": (1.0, 2.0)}, {"FA4": RuntimeError("no room"), "FA3": (1.0, 2.0)}, "FA3"),
        ({"FA4": (1.0, 1.0)}, {}, DEFAULT),
    ],
    ids=["slower on one", "fails on one", "not on one"],
)
def test_all_ranks_use_what_is_fastest_on_its_slowest_rank(
    first: Implementations, second: Implementations, used: str, tmp_path: Path
) -> None:
    assert run_on(2, chosen_by, tmp_path / "used.pt", (first, second)) == [used, used]


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_what_is_activated_on_a_device_is_its_fastest(width: int) -> None:
    """A few repetitions of some milliseconds: the times themselves are in the log."""
    found: dict[str, float] = {}
    measure = cuda._milliseconds

    def kept(*given: Any) -> dict[str, float]:
        found.update(measure(*given))
        return dict(found)

    with mock.patch.object(cuda, "_milliseconds", kept):
        used = activate_flash_attention((32, 8, width))
    assert all(0 < each < inf for each in found.values())
    assert used == min(found, key=found.__getitem__, default=DEFAULT)
