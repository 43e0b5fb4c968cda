"""The Ray actor of one engine: EngineHost over the connection to its server and the requests in flight there."""

from app.rollout.engine.host.engine_host import EngineHost
from app.rollout.engine.host.server_connection import HostSpec

__all__ = ["EngineHost", "HostSpec"]
