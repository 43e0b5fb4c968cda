"""`model.chat_template`: a template of one's own, for prompts and conversations, in checkpoints and in exports."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint.run_state import RunState, require_model
from app.config import RunConfig
from app.config.model import LoraConfig
from app.errors import CheckpointError
from app.model.hf_directory import identity, load_tokenizer
from app.start.environments import require_rendering, worker_spec
from app.start.preflight import preflight
from tests.byte_level import write_tokenizer
from tests.compose import composed
from tests.refusals import refused

OWN = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    return path


def config_of(model: Path, template: Path, *overrides: str) -> RunConfig:
    return composed(f"model.path={model}", f"model.chat_template={template}", "data.template=chat", *overrides)


def test_prompts_and_conversations_are_rendered_by_the_own_template(tiny_model: Path, template: Path) -> None:
    inputs = preflight(config_of(tiny_model, template))
    (prompt,) = inputs.prompts.train.take(1)
    text = inputs.tokenizer.decode(prompt.token_ids)
    assert text == f"<|im_start|>{prompt.question}<|im_end|><|im_start|>"
    assert inputs.chat_template == OWN

    config = config_of(tiny_model, template, "environment._target_=tests.mode.own_environments.Guess")
    assert worker_spec(config, tiny_model).renderer.template == OWN
    require_rendering(config, tiny_model, load_tokenizer(tiny_model, chat_template=OWN))
    with refused("model.path", tiny_model):
        require_rendering(config, tiny_model, load_tokenizer(tiny_model))  # which renders by the model's


@pytest.mark.parametrize(
    "content", [b"{% for %}", b"{{ raise_exception('no') }}", b"\xff\xfe\x00"], ids=["no Jinja", "raises", "no text"]
)
def test_a_template_that_cannot_render_a_question_is_refused(tiny_model: Path, template: Path, content: bytes) -> None:
    template.write_bytes(content)
    with refused("model.chat_template", template):
        preflight(config_of(tiny_model, template))


def test_a_checkpoint_continues_with_the_text_that_it_was_trained_with(tiny_model: Path) -> None:
    def model(template: str | None) -> dict[str, Any]:
        return identity(tiny_model, LoraConfig(), template)

    for saved, given in ((OWN, OWN), (None, None)):
        require_model(RunState(3, 3, model=model(saved)), model(given), Path("step_3"))
    for saved, given in ((OWN, None), (None, OWN), (OWN, f"{OWN}\n")):
        with pytest.raises(CheckpointError, match="chat_template is "):
            require_model(RunState(3, 3, model=model(saved)), model(given), Path("step_3"))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("special", "template", "stop", "accepted"),
    [
        (("<|im_start|>", "<|im_end|>"), CHATML, [], True),
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), CHATML, [], False),  # of a base model
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), CHATML, ["<|im_end|>"], True),
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "User: {{ messages[0].content }} Assistant:", [], True),
    ],
)
def test_a_template_that_ends_a_reply_with_a_token_that_ends_no_completion_is_refused(
    special: tuple[str, ...], template: str, stop: list[str], accepted: bool, tmp_path: Path
) -> None:
    path = write_tokenizer(tmp_path, special)
    config = composed("data.template=chat", f"rollout.stop={stop}")
    tokenizer = load_tokenizer(path, chat_template=template)
    with nullcontext() if accepted else refused("model.path", path, "<|im_end|>", "generation_config.json"):
        require_rendering(config, path, tokenizer)
