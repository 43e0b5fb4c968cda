"""Settings of `cluster`."""

from dataclasses import dataclass

from app.config.setting import SECONDS, setting


@dataclass
class ClusterConfig:
    """The Ray cluster."""

    address: str | None = setting(None, "Address of a running Ray cluster; null starts one on this machine.")
    timeout_s: float = setting(
        120.0, "Deadline for the cluster to offer the devices that the run needs.", above=0, noun=SECONDS
    )
