"""Seconds until an engine answers, and until a run has its first trained step: forked from an import, and importing.

    python -m tests.bench.start --rounds 5 --out tests/bench/results/start.json

An engine is the tiny model's on a CPU, from the call that starts it until its health check answers: `imports`, as a
process of its own; `forked`, by a fork server that has imported SGLang; `second`, another one beside it. A run is
`python -m app steps=1 eval.before_train=false` on a created model, from the command until its first step stands in
`metrics.jsonl`: with its own fork server, and without one. All ways take turns in every round.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.config.model import ModelConfig
from app.cpu_engine.forked_server import SOCKET_VARIABLE, fork_server
from app.device import Fork
from app.device.cpu import DEVICE
from app.model.hf_directory import locate
from app.rollout.engine.client import Client
from app.rollout.engine.server import Server, ServerSpec
from tests.bench.machine import Options, busy, conditions, machine, publish, spread

POLL_INTERVAL_S = 0.02
LIMIT_SECONDS = 300.0
RUN = ["steps=1", "eval.before_train=false", "checkpoint.keep=0", "checkpoint.export=false"]
WAYS = ("imports", "forked", "second", "run_imports", "run_forked")
TARGETS = {"forked": 8.0, "run_forked": 12.0}  # seconds


def spec_of(model: Path, folder: Path, name: str, fork: Fork | None) -> ServerSpec:
    return ServerSpec(
        name=name,
        model_path=str(model),
        host="127.0.0.1",
        port=0,
        key="bench",
        flags={
            **DEVICE.engine_flags,
            "mem-fraction-static": DEVICE.engine_fraction,
            "dtype": "float32",
            "skip-tokenizer-init": True,
            "max-total-tokens": DEVICE.max_kv_tokens,
        },
        environment={**DEVICE.engine_env, "OMP_NUM_THREADS": "1"},
        log=folder / f"{name}.log",
        fork=fork,
    )


@contextmanager
def started(spec: ServerSpec, seconds: list[float]) -> Iterator[None]:
    """Start a server; append the seconds until it answered, and stop it after the block."""
    server = Server(spec)

    async def start() -> None:
        began = time.perf_counter()
        await server.start()
        client = Client(spec.name, f"http://127.0.0.1:{server.spec.port}", spec.key)
        async with asyncio.timeout(LIMIT_SECONDS):
            while not await client.healthy():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(POLL_INTERVAL_S)
        seconds.append(time.perf_counter() - began)
        await client.close()

    with asyncio.Runner() as runner:
        runner.run(start())
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            runner.run(server.died())


def wait_for_import(log: Path) -> None:
    while "imported SGLang" not in log.read_text(errors="replace"):
        time.sleep(POLL_INTERVAL_S)


def run_seconds(folder: Path, *, forks: bool) -> float:
    """Seconds until the first step of a run stands in its metrics."""
    environment = {**os.environ} if forks else {**os.environ, SOCKET_VARIABLE: str(folder / "none")}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *RUN, f"hydra.run.dir={folder / 'run'}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and "time/step" in metrics.read_text()):
        if process.poll() not in (None, 0) or time.perf_counter() - began > LIMIT_SECONDS:
            raise SystemExit(f"the run in {folder} made no step")
        time.sleep(POLL_INTERVAL_S)
    seconds = time.perf_counter() - began
    process.wait(LIMIT_SECONDS)
    return seconds


def one_round(model: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}

    def keep(way: str, before: dict[str, float], seconds: float) -> None:
        found[way] = {"seconds": round(seconds, 2), "before": before}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds: list[float] = []
        before = conditions()
        with started(spec_of(model, folder, "imports", None), seconds):
            keep("imports", before, seconds[-1])
        with fork_server(DEVICE.engine_env, folder / "fork.log") as fork:
            wait_for_import(folder / "fork.log")
            before = conditions()
            with started(spec_of(model, folder, "forked", fork), seconds):
                keep("forked", before, seconds[-1])
                before = conditions()
                with started(spec_of(model, folder, "second", fork), seconds):
                    keep("second", before, seconds[-1])
        for way, own in (("run_imports", False), ("run_forked", True)):
            (folder / way).mkdir()
            before = conditions()
            keep(way, before, run_seconds(folder / way, forks=own))
    return found


def main() -> None:
    given, _ = Options(__doc__, rounds=5).parse()
    model = locate(ModelConfig())
    rounds = [one_round(model) for _ in range(given.rounds)]
    result = {
        "what": "start",
        **{way: spread((each[way]["seconds"] for each in rounds), 1) for way in WAYS},
        "engine_forked_over_imports": spread((e["forked"]["seconds"] / e["imports"]["seconds"] for e in rounds), 2),
        "run_forked_over_imports": spread(
            (e["run_forked"]["seconds"] / e["run_imports"]["seconds"] for e in rounds), 2
        ),
        "targets": TARGETS,
        "rounds": rounds,
        "busy": busy(each[way]["before"] for each in rounds for way in WAYS),
        "machine": machine(),
    }
    publish(result, given.out)


if __name__ == "__main__":
    main()
