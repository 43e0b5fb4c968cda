"""`model.chat_template`: a template of one's own, for prompts and conversations, in checkpoints and in exports."""

from pathlib import Path
from typing import Any

import pytest

from app.checkpoint.run_state import RunState, require_model
from app.config import RunConfig
from app.config.model import LoraConfig
from app.errors import CheckpointError, ConfigError
from app.mode.environments import require_rendering, worker_spec
from app.mode.preflight import preflight
from app.model.hf_directory import identity, load_tokenizer, own_template
from tests.compose import composed

QUESTION = [{"role": "user", "content": "12+7="}]
OWN = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    return path


def config_of(model: Path, template: Path, *overrides: str) -> RunConfig:
    return composed(f"model.path={model}", f"model.chat_template={template}", "data.template=chat", *overrides)


def test_prompts_are_rendered_by_the_own_template(tiny_model: Path, template: Path) -> None:
    inputs = preflight(config_of(tiny_model, template))
    (prompt,) = inputs.prompts.train.take(1)
    text = inputs.tokenizer.decode(prompt.token_ids)
    assert text == f"<|im_start|>{prompt.question}<|im_end|><|im_start|>"
    assert inputs.chat_template == OWN


def test_conversations_are_rendered_by_the_own_template(tiny_model: Path, template: Path) -> None:
    config = config_of(tiny_model, template, "environment._target_=tests.mode.own_environments.Guess")
    assert worker_spec(config, tiny_model).renderer.template == OWN
    require_rendering(config, tiny_model, load_tokenizer(tiny_model, chat_template=OWN))
    with pytest.raises(ConfigError, match="a question is rendered with"):
        require_rendering(config, tiny_model, load_tokenizer(tiny_model))  # which renders by the model's


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{% for %}", "is not valid Jinja"), ("{{ raise_exception('no') }}", "cannot be used (no)")],
)
def test_a_template_that_cannot_render_a_question_is_refused(
    tiny_model: Path, template: Path, text: str, problem: str
) -> None:
    template.write_text(text)
    with pytest.raises(ConfigError) as refused:
        preflight(config_of(tiny_model, template))
    assert str(refused.value).startswith(f"model.chat_template={template} is not accepted: ")
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tiny_model: Path, template: Path) -> None:
    template.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"model.chat_template={template} is not accepted"):
        own_template(config_of(tiny_model, template).model)


def test_a_checkpoint_continues_with_the_text_that_it_was_trained_with(tiny_model: Path) -> None:
    def model(template: str | None) -> dict[str, Any]:
        return identity(tiny_model, LoraConfig(), template)

    for saved, given in ((OWN, OWN), (None, None)):
        require_model(RunState(3, 3, model=model(saved)), model(given), Path("step_3"))
    for saved, given in ((OWN, None), (None, OWN), (OWN, f"{OWN}\n")):
        with pytest.raises(CheckpointError, match=r"another chat template: model\.chat_template"):
            require_model(RunState(3, 3, model=model(saved)), model(given), Path("step_3"))
