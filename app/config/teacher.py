"""Settings of `teacher`: a frozen model whose log-probabilities the policy is pulled towards."""

from dataclasses import dataclass
from typing import Any

from app.config.device import DeviceKind
from app.config.engine_flags import check_engine_flags
from app.config.model import ModelConfig
from app.config.setting import ADDRESS, SECONDS, setting
from app.errors import expect, named

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
    urls: list[str] | None = setting(
        None,
        "Addresses of running SGLang servers of the teacher, which has the policy's tokenizer; POSTTRAIN_TEACHER_KEY "
        "is their key, null is no teacher.",
        noun="a list of addresses such as http://host:30000",
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

    def model(self, policy: ModelConfig) -> ModelConfig | None:
        """Return the model of `path`, None without one: its code is trusted as that of the policy is."""
        if self.path is None:
            return None
        return ModelConfig(name="teacher", path=self.path, trust_remote_code=policy.trust_remote_code)

    def validate(self, temperature: float, policy: ModelConfig, device: DeviceKind) -> None:
        expect(self.path is None or not self.urls, "teacher.urls", self.urls, "null with teacher.path")
        if (model := self.model(policy)) is not None:
            with named("teacher.path"):
                model.validate()
        check_engine_flags("teacher.engine_args", self.engine_args, device, scores=True)

        for url in self.urls or ():
            expect(url.startswith(("http://", "https://")), "teacher.urls", url, ADDRESS)
        accepted = "1 with a teacher: servers score given tokens at temperature 1"
        expect(not self.given or temperature == 1, "rollout.temperature", temperature, accepted)
