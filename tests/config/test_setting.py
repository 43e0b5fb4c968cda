"""Bounds and help of settings: what a field declares is enforced, and `--help` shows it."""

import math

import pytest
from omegaconf import OmegaConf

from app.config.data import EvalSetConfig, TrainSetConfig
from app.config.resolvers import settings_help
from app.config.run import RunConfig
from app.config.setting import Bounds, Setting, check_bounds, settings
from tests.refusals import refused

SETTINGS = list(settings(RunConfig))
BOUNDED = [each for each in SETTINGS if each.bounds != Bounds()]


def configured(key: str, value: object) -> RunConfig:
    """A default configuration, with one training and one evaluation set, that differs in one setting."""
    config = RunConfig()
    config.data.train_sets["<name>"] = TrainSetConfig()
    config.data.eval_sets["<name>"] = EvalSetConfig()

    *sections, name = key.split(".")
    section: object = config
    for each in sections:
        section = section[each] if isinstance(section, dict) else getattr(section, each)
    setattr(section, name, value)
    return config


def outside(bounds: Bounds) -> list[float]:
    """A value just outside of each limit, NaN, and infinity unless it means no limit."""
    values = [math.nan, -math.inf, *([] if bounds.infinite else [math.inf])]
    if bounds.at_least is not None:
        values.append(bounds.at_least - 1)
    if bounds.at_most is not None:
        values.append(bounds.at_most + 1)
    values += [limit for limit in (bounds.above, bounds.below) if limit is not None]
    return values


def inside(bounds: Bounds) -> list[float]:
    """Each inclusive limit, a value just inside of each exclusive limit, and infinity where it means no limit."""
    values = [limit for limit in (bounds.at_least, bounds.at_most) if limit is not None]
    if bounds.above is not None:
        values.append(bounds.above + 1e-6)
    if bounds.below is not None:
        values.append(bounds.below - 1e-6)
    if bounds.infinite:
        values.append(math.inf)
    return values


@pytest.mark.parametrize("setting", BOUNDED, ids=lambda each: each.key)
def test_a_declared_bound_is_enforced(setting: Setting) -> None:
    for value in outside(setting.bounds):
        with refused(setting.key, value, f"give {setting.accepted}."):
            check_bounds(configured(setting.key, value))

    for value in inside(setting.bounds):
        check_bounds(configured(setting.key, value))


def test_infinity_is_no_limit_of_a_clip_and_no_number_of_anything_else() -> None:
    check_bounds(configured("trainer.max_grad_norm", math.inf))
    for key in ("trainer.lr", "epochs"):
        with refused(key, math.inf):
            check_bounds(configured(key, math.inf))


def test_null_is_within_every_bound_of_an_optional_setting() -> None:
    check_bounds(configured("rollout.port", None))
    check_bounds(configured("algorithm.dual_clip", None))


def test_help_shows_value_accepted_values_and_meaning_of_every_setting() -> None:
    text = " ".join(settings_help(_root_=OmegaConf.structured(RunConfig)).split())
    for each in SETTINGS:
        assert f"{each.key} = " in text
        assert f"{each.accepted} {each.help}" in text, each.key
