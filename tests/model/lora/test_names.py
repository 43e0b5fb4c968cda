"""Adapters in the form of SGLang. The names of PEFT: tests/checkpoint/test_adapters.py."""

from pathlib import Path

import torch

from app.config.model import LoraConfig
from app.model.load import load
from app.model.lora.names import delta, pairs, served
from app.model.policy import named_trained_tensors
from tests.model.lora.support import move
from tests.model.support import save_qwen35

LORA = LoraConfig(rank=4, alpha=8.0)


def test_the_parts_of_a_fused_projection_add_the_rows_of_the_whole(tmp_path: Path) -> None:
    """SGLang merges in_proj_q, _k, _v and _z; the checkpoint has in_proj_qkv, of 16 + 16 + 32 rows, and in_proj_z."""
    policy = load(save_qwen35(tmp_path / "model"), mesh=None, device="cpu", lora=LORA)
    move(policy)
    trained = dict(named_trained_tensors(policy))
    forms = [form for name, tensor in trained.items() for form in served(name, tensor, policy.config)]
    names = [name for name, _ in forms]
    assert len(names) == len(set(names)) == len(trained) + 3 * 2 * 2  # three layers of linear attention
    whole, parts = pairs(trained), pairs(dict(forms))
    layer = "model.layers.1.linear_attn.in_proj_"
    rows = [delta(*parts[f"{layer}{part}"], LORA.scale) for part in "qkv"]
    assert [len(each) for each in rows] == [16, 16, 32]
    assert torch.equal(torch.cat(rows), delta(*whole[f"{layer}qkv"], LORA.scale))
    assert torch.equal(parts[f"{layer}z"][1], whole[f"{layer}z"][1])
