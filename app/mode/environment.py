"""What the workers of the environment get from the configuration."""

from pathlib import Path

from app.config import RunConfig
from app.config.data import Template
from app.environment.remote import WorkerSpec
from app.environment.rendering import family_of
from app.environment.wire import Limits, RendererChoice


def worker_spec(config: RunConfig, model_path: Path) -> WorkerSpec:
    """Return what each worker runs.

    Raises:
        ConfigError: The model's chat format is not known.
    """
    settings = config.environment
    renderer = RendererChoice(
        family_of(model_path, config.data.template is Template.chat), str(model_path), settings.thinking.value
    )
    limits = Limits(
        settings.max_turns,
        settings.max_turn_tokens,
        settings.max_observation_tokens,
        settings.timeout_s,
        settings.episode_s,
    )
    environment = {
        "kind": settings.module,
        "target": settings._target_,
        "args": dict(settings.args),
        "tools": list(settings.tools),
        "id": settings.id,
        "url": settings.url,
    }
    return WorkerSpec(environment, renderer, limits, settings.memory_gib, settings.python)
