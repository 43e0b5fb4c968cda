"""Settings of `rollout`: the engines and how they sample."""

from dataclasses import dataclass, field
from typing import Any

from app.errors import expect


@dataclass
class RolloutConfig:
    tensor_parallel: int = 1  # devices per engine
    temperature: float = 1.0
    top_p: float = 1.0
    max_prompt_tokens: int = 64  # longer prompts are left out, and counted
    max_completion_tokens: int = 64
    max_inflight_groups: int = 64  # over all engines
    urls: list[str] = field(default_factory=list)  # servers that already run; empty: we start our own
    port: int | None = None  # of the first engine, the next one takes the next; null: free ones
    start_timeout_s: float = 300.0  # until a server answers its health check
    stall_timeout_s: float = 120.0  # without any new token while requests are in flight
    memory_fraction: float = 0.7  # of the device, for weights and KV cache
    engine_args: dict[str, Any] = field(default_factory=dict)  # SGLang server flags; they win over the device's


def validate(config: RolloutConfig) -> None:
    name = "rollout."
    for key in ("tensor_parallel", "max_prompt_tokens", "max_completion_tokens", "max_inflight_groups"):
        expect(getattr(config, key) >= 1, name + key, getattr(config, key), "a whole number of at least 1")
    expect(config.temperature > 0, name + "temperature", config.temperature, "a number above 0")
    expect(0 < config.top_p <= 1, name + "top_p", config.top_p, "a number above 0 and up to 1")
    expect(config.port is None or 0 < config.port < 65536, name + "port", config.port, "null or a port from 1 to 65535")
    for key in ("start_timeout_s", "stall_timeout_s"):
        expect(getattr(config, key) > 0, name + key, getattr(config, key), "a number of seconds above 0")
    expect(0 < config.memory_fraction < 1, name + "memory_fraction", config.memory_fraction, "a number between 0 and 1")
    for url in config.urls:
        expect(url.startswith(("http://", "https://")), name + "urls", url, "addresses such as http://host:30000")
