"""Settings of `teacher`: a frozen model whose log-probabilities the policy is pulled towards."""

from dataclasses import dataclass

from app.config.setting import SECONDS, setting
from app.errors import expect


@dataclass
class TeacherConfig:
    """On-policy distillation: a teacher scores the tokens that the policy sampled."""

    urls: list[str] = setting(
        [],
        "Addresses of running SGLang servers of the teacher, which has the policy's tokenizer; "
        "POSTTRAIN_TEACHER_KEY is their key, [] is no teacher.",
        noun="a list of addresses such as http://host:30000",
    )
    coefficient: float = setting(
        1.0,
        "Weight of the reverse KL: a token's advantage is reduced by this times log policy - log teacher.",
        above=0,
    )
    clip: float = setting(10.0, "Bound of log policy - log teacher of a token, in nats.", above=0)
    max_requests: int = setting(64, "Sequences being scored at a time, over all servers.", at_least=1)
    timeout_s: float = setting(120.0, "Deadline of a request.", above=0, noun=SECONDS)
    retries: int = setting(
        5, "Times that a failed request is sent again, to the next server; then the run ends.", at_least=0
    )

    def validate(self, *, temperature: float) -> None:
        """Raise `ConfigError` for an address without a scheme, and for a temperature that the teacher cannot have."""
        for url in self.urls:
            expect(url.startswith(("http://", "https://")), "teacher.urls", url, "addresses such as http://host:30000")
        accepted = "1 with teacher.urls: servers score given tokens at temperature 1"
        expect(not self.urls or temperature == 1, "rollout.temperature", temperature, accepted)
