"""Every command of README and docs composes to a configuration that could run; scripts and benchmarks exist."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.config.own_data import with_preset
from app.errors import ConfigError
from tests.compose import composed, jobs_of
from tests.docs.markdown import LAUNCHERS, PAGES, ROOT, Command, code_blocks, commands
from tests.folders import run_app

COMMANDS = list({command.line: command for page in PAGES for command in commands(page)}.values())
APP = [command for command in COMMANDS if "python -m app" in command.line]
OTHERS = [command for command in COMMANDS if command not in APP]
PRESETS = "myconf"  # the folder of the reader's own presets
MADE_UP = {  # what pages write → a folder below the test's own
    "<run>": "run",
    "<adapter>": "adapter",
    "/models/": "models/",
}
FOLDERS = ("run/export", "models/Qwen3-4B", "models/Qwen3-4B-eagle3", "models/Qwen3.5-9B")
FLAGS = {"--help", "-m", "--multirun"}
PLUGINS = ("sweep=optuna", "hydra/launcher=")  # optional extras


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up folders, and the presets that the pages show."""
    root = tmp_path_factory.mktemp("docs")
    for each in FOLDERS:
        (root / each).mkdir(parents=True)
    (root / "adapter").mkdir()
    settings = {"peft_type": "LORA", "bias": "none", "r": 16, "lora_alpha": 32}
    (root / "adapter/adapter_config.json").write_text(json.dumps(settings))
    weight = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({weight: np.zeros((16, 8), np.float32)}, root / "adapter/adapter_model.safetensors")

    for page in PAGES:
        for language, text in code_blocks(page):
            title = text.partition("\n")[0].removeprefix("# ")
            if language == "yaml" and title.startswith(f"{PRESETS}/"):
                path = root / title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.partition("\n")[2])
    return root


def overrides_of(words: Sequence[str], folder: Path) -> list[str]:
    """The overrides among the arguments, with the reader's presets on the search path."""
    words = list(words)
    overrides = []
    while words:
        word = words.pop(0)
        if word == "--cfg":
            words.pop(0)
        elif word == "--config-dir":
            overrides.append(f"hydra.searchpath=[file://{folder / words.pop(0)}]")
        elif word not in FLAGS:
            overrides.append(word.replace(f"file://{PRESETS}", f"file://{folder / PRESETS}"))
    return overrides


def arguments(command: Command, folder: Path) -> list[str]:
    line = command.line
    for written, there in MADE_UP.items():
        line = line.replace(written, f"{folder / there}{'/' if there.endswith('/') else ''}")
    return shlex.split(line, comments=True)


@pytest.mark.parametrize("command", APP, ids=str)
def test_a_command_of_the_application_composes(command: Command, folder: Path) -> None:
    if any(plugin in command.line for plugin in PLUGINS):
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    words = arguments(command, folder)
    words = words[words.index("app") + 1 :]
    jobs = jobs_of(overrides_of(words, folder), multirun="-m" in words)

    if command.output is not None:
        with pytest.raises(ConfigError) as refused:
            composed(*jobs[0])
        assert str(refused.value) == command.output
        return

    for job in (jobs[0], jobs[-1]):
        composed(*with_preset(job))


@pytest.mark.parametrize("option", ["--config-dir", "hydra.searchpath="])
def test_the_readers_own_presets_are_found_from_their_folder(option: str, folder: Path) -> None:
    (command,) = [each for each in APP if option in each.line and "experiment=mine" in each.line]
    words = shlex.split(command.line)
    code, text = run_app(*words[words.index("app") + 1 :], cwd=folder)
    assert code == 0, text
    assert text.startswith("qwen3_4b · mine · colocate on 8 cuda device(s)\n")


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_a_script_or_benchmark_exists_and_its_settings_compose(command: Command, folder: Path) -> None:
    words = arguments(command, folder)
    if "-m" in words and words[0] != "bash":
        module = ROOT / words[words.index("-m") + 1].replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        return

    (script,) = [word for word in words if word.startswith("launch/")]
    assert (ROOT / script).is_file()
    if script in LAUNCHERS:
        settings = words[words.index(script) + 1 :]
        composed(*[word for word in settings if "=" in word and not word.startswith("-")])
