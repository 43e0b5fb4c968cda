"""Which files of a model directory hold its weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.model.hf_checkpoint import match, open_checkpoint
from app.model.hf_directory import require_complete
from app.model.lora.base_weights import fingerprint
from tests.refusals import refused

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model in two files with an index."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(sorted(weights))}
    for shard in SHARDS:
        save_file({name: weights[name] for name, file in weight_map.items() if file == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_the_weights_are_those_of_the_index_and_no_others_in_the_folder(sharded: Path, tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    before = fingerprint(sharded)
    name = sorted(weights)[0]
    nines = torch.full_like(weights[name], 9.0)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, sharded / "consolidated.safetensors")
    save_file({name: nines}, sharded / "model-00003-of-00003.safetensors")  # left by an earlier save
    save_file({**load_file(sharded / SHARDS[1]), name: nines}, sharded / SHARDS[1])  # the index names the other file

    with open_checkpoint(sharded) as checkpoint:
        shapes = {each: tuple(tensor.shape) for each, tensor in weights.items()}
        names = match(shapes, checkpoint, ignored=(), tied=())
        assert all(torch.equal(checkpoint.read(names[each]), weights[each]) for each in weights)
    assert fingerprint(sharded) == before == fingerprint(tiny_model)


def test_the_single_file_of_transformers_is_read_without_an_index(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    save_file({"wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names == set(load_file(tiny_model / "model.safetensors"))


@pytest.mark.parametrize("index", [None, "{", "[]", '{"weight_map": 3}'])
def test_a_missing_shard_and_a_broken_index_are_refused(index: str | None, sharded: Path) -> None:
    if index is None:
        (sharded / SHARDS[1]).unlink()
    else:
        (sharded / "model.safetensors.index.json").write_text(index)
    with refused("model.path", sharded, SHARDS[1] if index is None else "index.json"):
        require_complete(sharded, str(sharded))
