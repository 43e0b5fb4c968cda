"""Settings of `rollout`: the engines and their sampling."""

from dataclasses import dataclass
from typing import Any

from app.config.setting import ADDRESS, SECONDS, TEXTS, setting
from app.errors import expect

NO_DRAFTS, OWN_HEAD = "none", "mtp"  # values of `speculative` that are no directory
DRAFTS = "none, mtp, or the directory of an EAGLE3 draft"


@dataclass
class RolloutConfig:
    """SGLang engines, sampling and length limits."""

    tensor_parallel: int = setting(1, "Devices per engine.", at_least=1)
    temperature: float = setting(1.0, "Sampling temperature; the trainer's log-probabilities use it too.", above=0)
    top_p: float = setting(1.0, "Only 1 is accepted in training; evaluations have eval.top_p.", above=0, at_most=1)
    stop: list[str] = setting(
        [], "Texts that end a completion, of evaluations too; their tokens stay in it and are trained on.", noun=TEXTS
    )
    max_prompt_tokens: int = setting(64, "Longer prompts are dropped from the data, and counted.", at_least=1)
    max_completion_tokens: int = setting(64, "Tokens after which a completion is truncated.", at_least=1)
    max_inflight_groups: int | None = setting(None, "Groups sampled at a time; null: what KV caches hold.", at_least=1)
    speculative: str = setting(
        NO_DRAFTS,
        "Drafts of the next tokens, which an engine verifies in one pass: those of Qwen3.5's own head (mtp) or of an "
        "EAGLE3 draft; what is sampled, and its log-probabilities, are the policy's all the same.",
        noun=DRAFTS,
    )
    urls: list[str] = setting(
        [], "Addresses of running SGLang servers; [] starts the run's own engines.", noun="a list of addresses"
    )
    port: int | None = setting(
        None, "Port of the first engine, counted up for the others; null takes free ones.", at_least=1, at_most=65535
    )
    start_timeout_s: float = setting(300.0, "Deadline for an engine's first reply.", above=0, noun=SECONDS)
    stall_timeout_s: float = setting(
        120.0, "Time without a new token, with requests in flight, until an engine is lost.", above=0, noun=SECONDS
    )
    memory_fraction: float | None = setting(
        None,
        "Share of a device's memory for the engine's weights and KV cache; null is 0.7 on devices shared with the "
        "trainer and on NPUs, 0.75 on GPUs of its own, and 0.3 on a CPU.",
        above=0,
        below=1,
    )
    engine_args: dict[str, Any] = setting(
        {},
        "SGLang server flags without the dashes, over those of device.engine_args; those with which training would be "
        "wrong or that a setting decides are refused.",
    )

    @property
    def drafts(self) -> bool:
        return self.speculative != NO_DRAFTS

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence: prompt and completion."""
        return self.max_prompt_tokens + self.max_completion_tokens

    def validate(self) -> None:
        """Raise `ConfigError` for an address without a scheme, and for sampling that makes log-probabilities wrong.

        Stop strings are fine: they end a completion, and every token of it was sampled from the policy.
        SGLang reports log-probabilities of the whole distribution, before top-p, top-k or min-p cut it.
        """
        accepted = "1: engines report log-probabilities before the cut; eval.top_p sets it for evaluations"
        expect(self.top_p == 1.0, "rollout.top_p", self.top_p, accepted)
        expect("" not in self.stop, "rollout.stop", self.stop, f"{TEXTS}, none of them empty")
        for url in self.urls:
            expect(url.startswith(("http://", "https://")), "rollout.urls", url, ADDRESS)
