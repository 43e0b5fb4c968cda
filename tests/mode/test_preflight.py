"""What is looked at before a run's folder exists."""

import json
import subprocess
import sys
from pathlib import Path

from app.mode.preflight import prepare
from tests.compose import composed
from tests.model.support import save_qwen3

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
        prepared = prepare(composed(f"model.path={path}", f"model.trust_remote_code={trusted}"), lambda _: None)
        assert (type(prepared.tokenizer).__name__ == "Own") == trusted


def test_a_run_of_the_tiny_model_is_prepared_without_torch(tiny_model: Path) -> None:
    """Its import takes seconds and 200 MB; an engine's host never needs it."""
    code = """
import sys
import app.mode.session, app.cluster.actors
from app.mode.preflight import prepare
from tests.compose import composed
tokens = prepare(composed(), print).tokenizer("1+2=")["input_ids"]
print(len(tokens), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "4 False"
