"""A server finds the models of our presets without importing SGLang's others, and the others when it needs one."""

import importlib.util

import pytest

from app.rollout.engine.entry import MODELS, MODELS_VARIABLE
from app.rollout.engine.sglang_plugin.models import qwen

OURS = ("Qwen3ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForCausalLMMTP")


@pytest.mark.parametrize("architecture", OURS)
def test_a_model_of_a_preset_is_sglangs_own_and_found_without_the_others(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, MODELS)
    spec = importlib.util.find_spec("sglang.srt.models.registry")  # as a server's process imports it
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, resolved = module.ModelRegistry.resolve_model_cls([architecture])
    assert resolved == architecture
    assert model.__module__.startswith("sglang.srt.models.qwen3")
    assert module.ModelRegistry.is_arch_supported(architecture)
    assert set(module.ModelRegistry.models) == {each.__name__ for each in qwen.EntryClass}
