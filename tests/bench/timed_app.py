"""`python -m tests.bench.timed_app`: the application, which also writes when its placement group was ready and seen.

The file named by `TIMES_VARIABLE` gets JSON: `ready_s`, from the request until Ray says that the group is
ready; `reserved_s`, from the request until the run goes on.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from app import main
from app.cluster import placement_group
from app.cluster.placement_group import DevicePlacement
from app.config import RunConfig
from app.device import Device

TIMES_VARIABLE = "POSTTRAIN_START_TIMES"
LIMIT_SECONDS = 120  # whole: Ray cuts it

ray_placement_group = placement_group.placement_group
app_reserve = placement_group.reserve
requested: list[float] = []
ready: list[float] = []


def request_and_watch(*args: Any, **settings: Any) -> Any:
    """Request a placement group; a thread notes when it is ready, whatever the application is doing."""
    requested.append(time.perf_counter())
    group = ray_placement_group(*args, **settings)
    threading.Thread(target=_watch, args=(group,), daemon=True).start()
    return group


def _watch(group: Any) -> None:
    if group.wait(LIMIT_SECONDS):
        ready.append(time.perf_counter())


async def timed_reserve(config: RunConfig, device: Device) -> DevicePlacement:
    """Reserve the devices of the run and write how long it took."""
    reserved = await app_reserve(config, device)
    now = time.perf_counter()
    seen = ready[-1] if ready else now  # the run was faster
    times = {"ready_s": round(seen - requested[-1], 3), "reserved_s": round(now - requested[-1], 3)}
    _write(times)
    return reserved


def _write(times: dict[str, float]) -> None:
    Path(os.environ[TIMES_VARIABLE]).write_text(json.dumps(times))


if __name__ == "__main__":
    placement_group.placement_group = request_and_watch
    placement_group.reserve = timed_reserve
    main.cli()
