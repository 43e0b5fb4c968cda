"""Settings of `cluster`."""

from dataclasses import dataclass

from app.errors import expect


@dataclass
class ClusterConfig:
    address: str | None = None  # a running Ray cluster; null starts one on this machine
    timeout_s: float = 120.0  # for the resources to appear


def validate(config: ClusterConfig) -> None:
    expect(config.timeout_s > 0, "cluster.timeout_s", config.timeout_s, "a number of seconds above 0")
