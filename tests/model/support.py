"""Random models and packed batches for the tests of `app.model`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.device.torchvision_shim import transformers
from app.model.packing import Packing
from app.trainer import microbatch
from app.types import TokenSequence
from tests.tiny_models.tokenizer import build_tokenizer

LENGTHS = (5, 17, 3, 16, 9, 1)  # the last one has no completion token


@dataclass(frozen=True, slots=True)
class Batch:
    sequences: list[Tensor]  # each [L]
    prompts: list[int]  # tokens of each sequence's prompt
    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    packing: Packing
    logit_positions: Tensor  # [N]
    targets: Tensor  # [N]

    @property
    def inputs(self) -> dict[str, Any]:
        names = ("input_ids", "position_ids", "packing", "logit_positions", "targets")
        return {name: getattr(self, name) for name in names}


def batch(vocabulary: int, lengths: tuple[int, ...] = LENGTHS, *, prompt: int = 2, seed: int = 0) -> Batch:
    """Random sequences with a prompt of `prompt` tokens each."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(4, vocabulary, (length,), generator=generator) for length in lengths]
    return pack(sequences, prompt)


def siblings(vocabulary: int, *, prompts: tuple[int, ...] = (6, 1, 9), group: int = 3, seed: int = 0) -> Batch:
    """Random groups of sequences with one prompt each, whose tokens but the last are packed once, as a trainer does."""
    generator = torch.Generator().manual_seed(seed)
    sequences: list[Tensor] = []
    samples = []
    for number, length in enumerate(prompts):
        prompt = torch.randint(4, vocabulary, (length,), generator=generator)
        for member in range(group):
            completion = torch.randint(4, vocabulary, (3 * member + 1,), generator=generator)
            sequences.append(torch.cat([prompt, completion]))
            sampled = np.arange(len(sequences[-1])) >= length
            sequence = TokenSequence.demonstration(sequences[-1].numpy(), sampled)
            samples.append(microbatch.Sample(sequence, 0.0, 1.0, (str(number), member, 0), len(completion)))

    packed = microbatch.pack(samples, torch.device("cpu"))
    lengths = [length for length in prompts for _ in range(group)]
    of_logits = (packed.logit_positions, packed.targets)
    return Batch(sequences, lengths, packed.input_ids, packed.position_ids, packed.packing, *of_logits)


def pack(sequences: list[Tensor], prompt: int = 2) -> Batch:
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence))
    logit_positions = [
        start + position - 1
        for start, sequence in zip(starts, sequences, strict=False)
        for position in range(prompt, len(sequence))
    ]
    packed = torch.cat(sequences)
    positions = torch.tensor(logit_positions, dtype=torch.int64)
    return Batch(
        sequences=sequences,
        prompts=[prompt] * len(sequences),
        input_ids=packed[None],
        position_ids=torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None],
        packing=Packing.of(starts),
        logit_positions=positions,
        targets=packed[positions + 1],
    )


def save_qwen3(folder: Path, *, tied: bool = True, seed: int = 0, spread: float = 0.2) -> Path:
    """Save a random Qwen3 with grouped heads. Its weights are wide enough to distinguish tokens."""
    config = transformers().Qwen3Config(
        vocab_size=101,  # odd, so that two ranks hold different numbers of rows
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=spread,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    return _save(transformers().Qwen3ForCausalLM, config, folder, seed)


def save_qwen35(folder: Path, *, seed: int = 0, spread: float = 0.2, layers: int = 4) -> Path:
    """Save a random Qwen3.5 in the layout of the hub: nested text model, vision tower, multi-token prediction."""
    text = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,  # three of four have linear attention
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": spread,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers().Qwen3_5Config(
        text_config=text,
        vision_config=vision | {"num_position_embeddings": 16},
        tie_word_embeddings=False,
        dtype="float32",
    )
    _save(transformers().Qwen3_5ForConditionalGeneration, config, folder, seed)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 3)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_kind(kind: str, folder: Path, **settings: Any) -> Path:
    """Save a small random model of one of transformers' families: `save_kind("Phi", folder, resid_pdrop=0.1)`."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    library = transformers()
    config = getattr(library, f"{kind}Config")(**sizes | settings)
    model = getattr(library, f"{kind}LMHeadModel", None) or getattr(library, f"{kind}ForCausalLM")
    return _save(model, config, folder, 0)


SAVE: dict[str, Callable[[Path], Path]] = {
    "tied": save_qwen3,
    "untied": partial(save_qwen3, tied=False),
    "qwen35": save_qwen35,
}


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder)
    build_tokenizer(256).save_pretrained(folder)
    return folder


def reference(path: Path, packed: Batch, temperature: float) -> tuple[Any, Tensor, Tensor]:
    """Run transformers on each sequence alone: the model, log-probabilities [N] and entropies [N]."""
    model = transformers().AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    logprobs, entropies = [], []
    for sequence, prompt in zip(packed.sequences, packed.prompts, strict=True):
        if len(sequence) <= prompt:
            continue
        logits = model(input_ids=sequence[None], use_cache=False).logits[0, prompt - 1 : -1] / temperature
        logs = torch.log_softmax(logits.float(), dim=-1)
        logprobs.append(logs.gather(1, sequence[prompt:, None]).squeeze(1))
        entropies.append(-(logs.exp() * logs).sum(dim=1))
    return model, torch.cat(logprobs), torch.cat(entropies)


def logprobs_of(model: Any, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N] of the completions of `batch(101)`, of a model of transformers or PEFT, one at a time."""
    packed, found = batch(101), []
    for sequence, prompt in zip(packed.sequences, packed.prompts, strict=True):
        logits = model(input_ids=sequence[None], use_cache=False).logits[0].double() / temperature
        found.append(logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None])[prompt - 1 :, 0])
    return torch.cat(found)


def weights(packed: Batch) -> Tensor:
    """Weights [N] of the log-probabilities in a test loss."""
    return torch.linspace(-1.0, 1.0, len(packed.targets))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item()


class Operators(TorchDispatchMode):
    """Counts the operators that run and are no views, by name: `aten.mm.default`."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled beside this mode."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))
