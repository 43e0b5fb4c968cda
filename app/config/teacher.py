"""Settings of `teacher`: a frozen model whose log-probabilities the policy is pulled towards."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from app.config.engine_flags import check_engine_flags
from app.config.model import ModelConfig
from app.config.setting import SECONDS, setting
from app.errors import expect, named

ADDRESSES = "a list of addresses such as http://host:30000"
ANY_SOURCE = "*"  # of the teacher that scores every prompt
MAX_REQUESTS = 64  # sequences being scored at a time, over all servers
RETRIES = 5  # of a request, at the next server; then the run ends
MAX_RETRY_DELAY_S = 16.0  # before a request is sent again


@dataclass
class TeacherConfig:
    """On-policy distillation: a teacher scores the tokens that the policy sampled."""

    path: str | None = setting(
        None,
        "Teacher that the run starts on devices of its own, with the policy's tokenizer; null starts none.",
        noun="a Hugging Face model directory or hub id",
    )
    devices: int = setting(1, "Devices of the engine of teacher.path, beside those of placement.", at_least=1)
    engine_args: dict[str, Any] = setting({}, "SGLang server flags of that engine, over device.engine_args.")
    urls: Any = setting(
        None,
        "Addresses of running SGLang servers of the teacher, which has the policy's tokenizer; with several teachers, "
        "those of each by the data source that it scores; POSTTRAIN_TEACHER_KEY is their key, null is no teacher.",
        noun=f"null, {ADDRESSES}, or {{source: such a list, …}}",
    )
    coefficient: float = setting(
        1.0, "Weight of the reverse KL: it times log policy - log teacher is taken off a token's advantage.", above=0
    )
    clip: float = setting(10.0, "Bound of log policy - log teacher of a token, in nats.", above=0, infinite=True)
    timeout_s: float = setting(120.0, "Deadline of a request.", above=0, noun=SECONDS)

    @property
    def limit_s(self) -> float:
        """The most seconds that scoring a sequence may take, with every retry; 0 without a teacher."""
        return (RETRIES + 1) * (self.timeout_s + MAX_RETRY_DELAY_S) if self.given else 0.0

    @property
    def given(self) -> bool:
        return self.path is not None or bool(self.urls)

    @property
    def servers(self) -> dict[str, list[str]]:
        """The addresses of each teacher, by the data source that it scores, or `ANY_SOURCE`; empty without one."""
        if isinstance(self.urls, dict):
            return {str(source): list(urls) for source, urls in self.urls.items()}
        return {ANY_SOURCE: list(self.urls)} if self.urls else {}

    def model(self, policy: ModelConfig) -> ModelConfig | None:
        """Return the model of `path`, None without one: its code is trusted as that of the policy is."""
        if self.path is None:
            return None
        return ModelConfig(name="teacher", path=self.path, trust_remote_code=policy.trust_remote_code)

    def validate(self, temperature: float, sources: Collection[str], policy: ModelConfig) -> None:
        expect(self.path is None or not self.urls, "teacher.urls", self.urls, "null with teacher.path")
        if (model := self.model(policy)) is not None:
            with named("teacher.path"):
                model.validate()
        check_engine_flags("teacher.engine_args", self.engine_args, scores=True)

        by_source = self.urls if isinstance(self.urls, dict) else {ANY_SOURCE: self.urls or []}
        for source, urls in by_source.items():
            key = "teacher.urls" if source == ANY_SOURCE else f"teacher.urls.{source}"
            given = isinstance(urls, list) and (bool(urls) or source == ANY_SOURCE)
            expect(given, key, urls, ADDRESSES)
            for url in urls:
                expect(str(url).startswith(("http://", "https://")), key, url, ADDRESSES)
        if isinstance(self.urls, dict):
            accepted = f"a teacher for each data source and for no other: {', '.join(sources)}"
            expect(set(self.servers) == set(sources), "teacher.urls", list(self.servers), accepted)

        accepted = "1 with a teacher: servers score given tokens at temperature 1"
        expect(not self.given or temperature == 1, "rollout.temperature", temperature, accepted)
