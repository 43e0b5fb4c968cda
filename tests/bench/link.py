"""A delta sync compared with a full one over a link of 1 Gbit/s: `python -m tests.bench.link [--out FILE]`.

Two network namespaces joined by a pair of virtual interfaces, each limited by a token bucket (`tc … tbf`), stand for
two machines. The driver, its Ray and the trainer rank are in one, a real SGLang server in the other: its only way to
the trainer is the link. Model, steps and syncs are those of `tests.bench.delta`. Needs root, which creates namespaces;
they are removed in the end, also after a failure. Prints one JSON line.
"""

import os
import shutil
import signal
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.config.device import Dtype
from app.rollout.engine.server import KEY_VARIABLE, ServerSpec
from app.utils.net import url_of
from app.utils.process import PARENT_VARIABLE, package_path
from tests.bench.delta import options, side_by_side
from tests.bench.machine import machine, print_result
from tests.bench.random_model import QWEN3_06B, save_random_qwen3

PREFIX = 24
PORT = 30_000  # of the engine; nothing else runs in its namespace
BURST = "1mb"  # of the token bucket: more than the link carries between two ticks of the kernel
LATENCY = "50ms"  # a queue that is longer drops packets
PROGRAMS = ("ip", "tc")
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Side:
    """One end of the link."""

    namespace: str
    interface: str
    address: str


@dataclass(frozen=True)
class Link:
    """Two network namespaces and the link between them, named after this process."""

    megabit: int
    trainer: Side
    engine: Side

    @classmethod
    def named(cls, megabit: int, number: int) -> "Link":
        return cls(
            megabit,
            Side(f"posttrain-trainer-{number}", f"tr{number}", "10.77.0.1"),
            Side(f"posttrain-engine-{number}", f"en{number}", "10.77.0.2"),
        )

    @contextmanager
    def up(self) -> Iterator[None]:
        """Create it for the block. Removing a namespace removes its interface and the rate limit."""
        sides = (self.trainer, self.engine)
        try:
            for side in sides:
                run("ip", "netns", "add", side.namespace)
            ends = [["name", side.interface, "netns", side.namespace] for side in sides]
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for side, other in (sides, sides[::-1]):
                within = ("ip", "-n", side.namespace)
                run(*within, "addr", "add", f"{side.address}/{PREFIX}", "dev", side.interface)
                run(*within, "link", "set", "lo", "up")
                run(*within, "link", "set", side.interface, "up")
                # Ray takes the address of the default route for this machine's
                run(*within, "route", "add", "default", "via", other.address)
                limit = ("rate", f"{self.megabit}mbit", "burst", BURST, "latency", LATENCY)
                run("tc", "-n", side.namespace, "qdisc", "add", "dev", side.interface, "root", "tbf", *limit)
            yield
        finally:
            for side in sides:
                subprocess.run(["ip", "netns", "delete", side.namespace], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def refusal() -> str | None:
    """Return why this machine cannot have the link, in one sentence."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"tests.bench.link needs {' and '.join(missing)} of iproute2 to make network namespaces."
    if os.geteuid() != 0:
        return "tests.bench.link needs root to make network namespaces."
    return None


@contextmanager
def served(spec: ServerSpec, side: Side) -> Iterator[None]:
    """Run a server in a namespace during the block."""
    environment = {
        PARENT_VARIABLE: str(os.getpid()),
        **os.environ,
        **spec.environment,
        KEY_VARIABLE: spec.key,
        "GLOO_SOCKET_IFNAME": side.interface,
        "PYTHONPATH": package_path(os.environ.get("PYTHONPATH")),
    }
    with spec.log.open("ab") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", side.namespace, *spec.command()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)


async def measure(link: Link, rounds: int, rate: float, bucket_mib: float, folder: Path) -> dict[str, Any]:
    """Measure from inside the trainer's namespace."""
    from tests.conftest import server_spec
    from tests.rollout.support import engine_at
    from tests.weight_sync.support import make_trainer, started

    model = save_random_qwen3(folder / "model", QWEN3_06B)
    flags: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 2048, "log_level": "warning"}
    spec = replace(server_spec(model, folder, host=link.engine.address, **flags), port=PORT)
    with served(spec, link.engine):
        engine = engine_at(url_of(spec.host, spec.port), spec.key, folder, "engine 0")
        await engine.start(600)
        trainer = await started(make_trainer(model, folder, dtype=Dtype.bfloat16), weights=False)
        found = await side_by_side(trainer, engine, folder, rounds=rounds, rate=rate, bucket_mib=bucket_mib)

    full = found.reports["full"]
    return {
        "what": "link",
        "parameters": full[0].bytes // 2,
        "megabit_per_second": link.megabit,
        "megabit_per_second_of_a_full_push": [round(8e-6 * each.bytes / each.seconds["load"]) for each in full],
        "lr": rate,
        "bucket_mib": bucket_mib,
        **found.result(),
        "targets": {"seconds_over_full": 0.06},
        "rounds": rounds,
        "machine": machine(),
    }


def main() -> None:
    parser = options()
    parser.description = __doc__
    parser.add_argument("--megabit", type=int, default=1000)
    parser.add_argument("--inside", type=int, help=SUPPRESS)  # of the link of this number
    chosen, _ = parser.parse()
    if chosen.inside is not None:
        link = Link.named(chosen.megabit, chosen.inside)
        print_result(lambda folder: measure(link, chosen.rounds, chosen.lr, chosen.bucket_mib, folder), chosen.out)
        return

    if reason := refusal():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the namespaces
    link = Link.named(chosen.megabit, os.getpid())
    again = [sys.executable, "-m", "tests.bench.link", *sys.argv[1:], "--inside", str(os.getpid())]
    with link.up():
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": link.trainer.interface}
        done = subprocess.run(["ip", "netns", "exec", link.trainer.namespace, *again], check=False, env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
