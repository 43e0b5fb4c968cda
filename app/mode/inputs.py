"""What training would refuse of a run's inputs, as far as it can be found without a device, a download or a start.

| subject     | found here                                                       | found by a run only                |
|-------------|------------------------------------------------------------------|------------------------------------|
| model       | preset, directory, context; of a hub model what its cache has    | a hub model that cannot be reached |
| data        | files that are missing or malformed, missing fields              | hub data sets                      |
| reward      | a custom one that cannot be loaded, or fails on local rows       | failures on other rows             |
| environment | one that cannot be loaded, if the model is on this machine       | what it does in an episode         |
| tracker     | a custom one that cannot be loaded                               | what it does                       |
| transport   | a custom one that cannot be loaded                               | what it does                       |
| algorithm   | custom functions that fail on made-up values                     | failures on other values           |

`mode=plan` prints the sentences, `mode=doctor` has a line for each subject, and a run raises them before it starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from app.algorithm.custom_functions import require_own
from app.config import RunConfig
from app.config.data import DataConfig
from app.config.reward import RewardConfig
from app.data import rows, template
from app.data.counts import steps_of_epochs
from app.data.fields import Row
from app.errors import ConfigError
from app.mode.environments import require_environment
from app.model.architecture import architecture_of, checkpoint_config, require_context, require_own_preset
from app.model.hf_directory import local_folder, require_complete
from app.model.lora.base_weights import check_targets
from app.model.lora.count import layer_names
from app.reward.tryout import try_out
from app.tracking.own_tracker import require_trackers
from app.types import Prompt
from app.weight_sync.own_transport import own_transport

NO_TOKENS = np.zeros(1, np.int32)


def with_counted_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with the steps of its epochs; unchanged if only a run can count the rows.

    Prompts that are too long are counted, since only a tokenizer finds them. A run drops them before it counts.
    """
    if config.epochs is None or not rows.is_local(config.data):
        return config
    try:
        count = len(rows.load(config.data).train)
    except ConfigError:  # `check_data` finds it, too
        return config
    return replace(config, steps=steps_of_epochs(config.epochs, count, config.algorithm.prompts_per_step))


def check_sizes(config: RunConfig) -> None:
    """Raise `ConfigError` if the model and the settings of its preset do not go together."""
    require_own_preset(config.model)
    require_context(config.rollout, checkpoint_config(config.model), str(config.model.path))
    model = architecture_of(config.model)
    if config.model.lora.enabled and model is not None:
        check_targets(config.model.lora.targets, layer_names(model))


def check_model(config: RunConfig) -> None:
    """Raise `ConfigError` if the model's directory is incomplete, or its sizes are wrong."""
    if config.model.local.is_dir():
        require_complete(config.model.local, str(config.model.path))
    check_sizes(config)


def check_data(config: RunConfig) -> None:
    """Raise `ConfigError` if a local file cannot be read, or holds messages that `data` cannot render."""
    if not rows.is_local(config.data):
        rows.check_files(config.data)
        return
    loaded = rows.load(config.data)
    template.check([*loaded.train, *(row for each in loaded.evals.values() for row in each)], config.data)


def check_reward(config: RunConfig) -> None:
    """Raise `ConfigError` if a custom reward cannot be loaded, or fails on rows of local data as `try_out` says."""
    prompts = _some_prompts(config)
    reward = tried_reward(config)
    try_out(replace(reward, tryout=reward.tryout and bool(prompts)), prompts, lambda text: list(text.encode()))


def tried_reward(config: RunConfig) -> RewardConfig:
    """Return the rewards to try. Those that read turns or scores would fail on completions made up without them."""
    return replace(config.reward, tryout=config.reward.tryout and not config.environment.multi_turn)


def _some_prompts(config: RunConfig) -> list[Prompt]:
    """Return what custom rewards are tried on: a training prompt and one of each evaluation set, without tokens.

    None if there is no custom reward, or the data is not local or cannot be read.
    """
    custom = any(term.target is not None for term in config.reward.terms().values())
    if not custom or not rows.is_local(config.data):
        return []
    try:
        loaded = rows.load(config.data)
        return [
            _untokenized(row, config.data) for row in (loaded.train[0], *(each[0] for each in loaded.evals.values()))
        ]
    except ConfigError:
        return []


def _untokenized(row: Row, data: DataConfig) -> Prompt:
    messages = template.conversation(row, data)
    return Prompt(f"{row.source}/{row.index}", NO_TOKENS, row.answer, row.source, row.question, row.columns, messages)


def check_environment(config: RunConfig) -> None:
    """Raise `ConfigError` if an environment cannot be loaded; its renderer needs the model's files."""
    folder = local_folder(config.model) if config.environment.multi_turn else None
    if folder is not None:
        require_environment(config, folder)


def check_tracker(config: RunConfig) -> None:
    """Raise `ConfigError` if a tracker of the user cannot be loaded."""
    require_trackers(config.tracking)


def check_algorithm(config: RunConfig) -> None:
    """Raise `ConfigError` if an objective or advantage of the user cannot be used."""
    require_own(config.algorithm)


def check_transport(config: RunConfig) -> None:
    """Raise `ConfigError` if a transport of the user cannot be loaded."""
    own_transport(config.weight_sync)


CHECKS: Mapping[str, Callable[[RunConfig], None]] = {
    "model": check_model,
    "data": check_data,
    "reward": check_reward,
    "environment": check_environment,
    "tracker": check_tracker,
    "transport": check_transport,
    "algorithm": check_algorithm,
}


def problems(config: RunConfig) -> dict[str, str]:
    """Return a sentence for each subject that a run would refuse."""
    found: dict[str, str] = {}
    for subject, check in CHECKS.items():
        try:
            check(config)
        except ConfigError as error:
            found[subject] = str(error)
    return found
