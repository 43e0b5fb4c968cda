"""FlashAttention's newer kernels are used on cards that have them, if they equal torch's default ones."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from app.device import cuda
from app.device.cuda import activate_flash_attention


class Switch:
    """torch's switch, with implementations that give a factor of the default result, or raise."""

    def __init__(self, **implementations: float | Exception) -> None:
        self.implementations = implementations
        self.active: str | None = None

    def activate(self, name: str) -> None:
        found = self.implementations.get(name, ImportError(f"no {name}"))
        if isinstance(found, Exception):
            raise found
        self.active = name

    def restore(self) -> None:
        self.active = None

    def outputs(self, head_dim: int) -> list[torch.Tensor]:
        factor = self.implementations[self.active] if self.active else 1.0
        assert isinstance(factor, float)
        return [torch.linspace(-1, 1, head_dim) * factor]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Switch]:
    def install(capability: tuple[int, int] = (9, 0), **implementations: float | Exception) -> Switch:
        switch = Switch(**implementations)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(nn.attention, "activate_flash_attention_impl", switch.activate, raising=False)
        monkeypatch.setattr(nn.attention, "restore_flash_attention_impl", switch.restore, raising=False)
        monkeypatch.setattr(cuda, "_outputs", switch.outputs)
        return switch

    return install


@pytest.mark.parametrize(
    ("implementations", "used"),
    [
        ({"FA4": 1.0, "FA3": 1.0}, "FA4"),
        ({"FA3": 1.01}, "FA3"),  # not exactly equal: another order of summation
        ({"FA4": 1.1, "FA3": 1.0}, "FA3"),
        ({"FA4": float("nan")}, None),
        ({"FA4": RuntimeError("no backward for this head")}, None),
        ({}, None),
    ],
)
def test_the_fastest_kernels_that_equal_the_default_are_used(
    implementations: dict[str, float | Exception], used: str | None, installed: Callable[..., Switch]
) -> None:
    switch = installed(**implementations)
    assert activate_flash_attention(128) == used
    assert switch.active == used


@pytest.mark.parametrize("capability", [(8, 0), (12, 0), None], ids=["8", "12", "a torch without the switch"])
def test_other_cards_and_an_older_torch_keep_the_default(
    capability: tuple[int, int] | None, installed: Callable[..., Switch], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = installed(capability or (9, 0), FA4=1.0)
    if capability is None:
        monkeypatch.delattr(nn.attention, "activate_flash_attention_impl")
    assert activate_flash_attention(128) is None
    assert switch.active is None


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 128, 256])
def test_whatever_is_activated_on_a_device_equals_the_default(width: int) -> None:
    used = activate_flash_attention(width)
    assert used in (None, *cuda.IMPLEMENTATIONS)
