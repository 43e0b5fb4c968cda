"""Start a local Ray, or join a cluster."""

import asyncio
import logging
import os
import signal
import sys
import time
from typing import Any

import ray
from ray.job_config import JobConfig

from app.cluster.placement_group import bundles
from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device
from app.errors import RunError, one_line
from app.utils.ray_calls import last_ray_error

OBJECT_STORE_BYTES = 512 * 1024 * 1024
ATTEMPTS_VARIABLE = "RAY_gcs_server_port_wait_time_s"  # attempts to reach the head of a cluster
RETRY_DELAY_S = 1.0
START_ATTEMPTS = 3  # of a local Ray
MIN_CONNECT_S = 0.1
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}


class DriverPath(JobConfig):
    """Job settings of Ray without the working directory as the first entry of every worker's `sys.path`.

    Ray adds it even where the driver does not import from it, as with the console script. A folder `app` in it would
    hide this package from the workers.
    """

    def _serialize(self) -> str:
        imported_from = {os.path.abspath(path) for path in sys.path}
        self._py_driver_sys_path = [path for path in self._py_driver_sys_path if path in imported_from]
        return super()._serialize()


async def connect(config: RunConfig, device: Device) -> None:
    """Start a local Ray, or join `cluster.address`. Can be cancelled. Raises `RunError` if that fails."""
    os.environ |= {
        # Ray runs its workers at low priority by default, but ranks and engines are not background work.
        "RAY_worker_niceness": "0",
        # Ray hides all devices from an actor that reserves none. Engine hosts of colocate reserve none and need them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    # It logs a notice about its default (token) authentication.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)

    # Ray installs a SIGTERM handler that would exit without ending the processes of the run.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if config.cluster.address is None:
            _start_local(config, device)
        else:
            await _join(config.cluster.address, config.cluster.timeout_s)
    except SystemExit as error:  # Ray's handler, while it starts
        raise asyncio.CancelledError from error
    finally:
        signal.signal(signal.SIGTERM, handler)


async def _join(address: str, timeout_s: float) -> None:
    await _wait_for_head(address, timeout_s)
    # Ray tries 20 times, for half a minute each, to reach a head that accepts connections and does not reply.
    os.environ[ATTEMPTS_VARIABLE] = "1"
    try:
        ray.init(address=address, job_config=DriverPath(), **QUIET)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RunError(f"cluster.address={address} cannot be joined: {error}") from error
    finally:
        del os.environ[ATTEMPTS_VARIABLE]


async def _wait_for_head(address: str, timeout_s: float) -> None:
    """Wait until the head of the cluster accepts connections. Does nothing for addresses that Ray resolves (auto)."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()) or "://" in address:
        return

    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(left, MIN_CONNECT_S)):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return
        except (OSError, TimeoutError) as error:
            if time.monotonic() + RETRY_DELAY_S > deadline:
                reason = os.strerror(error.errno) if error.errno else "no reply"
                late = f"nothing accepted a connection within cluster.timeout_s={timeout_s:g} s"
                raise RunError(f"cluster.address={address} cannot be joined: {late}: {reason}") from error
        await asyncio.sleep(RETRY_DELAY_S)


def _start_local(config: RunConfig, device: Device) -> None:
    os.environ.pop("RAY_ADDRESS", None)  # of a cluster that the run does not join; its processes would
    # On CPU, a device is a share of the cores, and a run may have more devices than cores.
    needed = sum(int(bundle.get("CPU", 0)) for bundle in bundles(config, device))
    cores = max(needed, os.cpu_count() or 1)
    # Ray counts GPUs by itself, but not NPUs.
    resources: dict[str, float] = {device.resource: device.count()} if device.kind is DeviceKind.npu else {}

    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",  # never a cluster that another user runs on this machine
                num_cpus=cores,
                resources=resources,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                job_config=DriverPath(),
                **QUIET,
            )
            return
        except Exception as error:  # Ray's own type where its node is not up within 30 s, as on a busy machine
            if attempt == START_ATTEMPTS:
                failed = f"Ray did not start on this machine in {START_ATTEMPTS} attempts"
                raise RunError(f"{failed}: {one_line(error)}{last_ray_error()}") from error
