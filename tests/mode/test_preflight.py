"""What is checked before a run's folder exists, and that it is loaded once."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import app.data.build as data
from app.config.device import DeviceKind
from app.device import base, device_of
from app.mode.preflight import _slow_attention, preflight, take_inputs
from tests.compose import composed
from tests.model.support import save_qwen3, save_qwen35

OWN = """
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    pass
"""


def test_a_models_own_tokenizer_is_loaded_only_where_its_code_is_trusted(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "qwen3")
    (path / "own.py").write_text(OWN)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for trusted in (True, False):
        inputs = take_inputs(composed(f"model.path={path}", f"model.trust_remote_code={trusted}"), lambda _: None)
        assert (type(inputs.tokenizer).__name__ == "Own") == trusted


def test_the_run_takes_what_preflight_loaded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    build = data.build
    monkeypatch.setattr(data, "build", lambda *args, **kwargs: loaded.append(args) or build(*args, **kwargs))
    preflight(composed())
    take_inputs(composed(), lambda _: None)
    assert len(loaded) == 1
    take_inputs(composed(), lambda _: None)  # taken once: a second run of the process loads its own
    assert len(loaded) == 2


def test_the_inputs_of_another_configuration_are_not_taken(tiny_model: Path) -> None:
    preflight(composed("data.arithmetic.problems=50"))
    assert len(take_inputs(composed("data.arithmetic.problems=60"), lambda _: None).prompts.train) == 60


def test_warnings_about_the_data_are_recorded_by_the_run(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "#### 2"}\n' * 20)
    first, second = take_inputs(composed(f"data.path={rows}", "data=gsm8k"), lambda _: None).warnings
    assert first.startswith(f"data.path={rows} is a file without splits: holding out 0.05 of its rows")
    assert second.startswith("1 of the 1 questions of evaluation set test are in the training set")


def test_dropped_prompts_are_a_warning_of_the_run(tiny_model: Path) -> None:
    inputs = take_inputs(composed("rollout.max_prompt_tokens=4"), lambda _: None)
    assert inputs.prompts.dropped > 0
    expected = f"dropped {inputs.prompts.dropped} of 2200 prompts: longer than rollout.max_prompt_tokens=4"
    assert inputs.warnings == (expected,)
    assert take_inputs(composed(), lambda _: None).warnings == ()


@pytest.mark.parametrize(
    ("kind", "installed", "remedy"),
    [
        (DeviceKind.cpu, False, None),  # a CPU computes the loop as fast as anything
        (DeviceKind.cuda, False, "install flash-linear-attention"),
        (DeviceKind.cuda, True, None),
        (DeviceKind.npu, True, "device=npu has no kernels for it"),
    ],
)
def test_linear_attention_without_kernels_is_a_warning(
    kind: DeviceKind, installed: bool, remedy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if not installed:
            raise PackageNotFoundError(package)
        return "0.6.0"

    monkeypatch.setattr(base, "version", version)
    assert _slow_attention(save_qwen3(tmp_path / "qwen3"), device_of(kind)) == []
    warnings = _slow_attention(save_qwen35(tmp_path / "qwen35"), device_of(kind))
    assert [each.rpartition(": ")[2] for each in warnings] == ([] if remedy is None else [remedy])


def test_the_inputs_of_the_tiny_model_are_loaded_without_torch(tiny_model: Path) -> None:
    """Its import takes seconds and 200 MB, and an engine's host never needs it."""
    code = """
import sys
import app.mode.session, app.cluster.actors
from app.mode.preflight import take_inputs
from tests.compose import composed
tokens = take_inputs(composed(), print).tokenizer("1+2=")["input_ids"]
print(len(tokens), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "4 False"
