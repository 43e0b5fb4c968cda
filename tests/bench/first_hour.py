"""The first hour on new hardware: what works, how fast, and what differs from the expectation.

    python -m tests.bench.first_hour cuda|npu|cpu [SETTING=VALUE ...] [--tiny] [--model FOLDER | --random-weights]
        [--steps N] [--only CHECK ...] [--out FILE]

`bash launch/first_hour.sh` runs this in the right environment. Every check is a command in a process of its own with a
deadline; a check that fails does not end the others:

    doctor              mode=doctor
    parity              mode=parity: kernels, weight sync and engine against a CPU in float32
    handovers           colocate: sleep, wake and sync, three times
    syncs               fully_async: idle, with completions in flight, with an engine killed in mid-sync
    colocate            steps of GRPO: tokens/s, MFU, memory against the plan
    fully_async         the same with half of the devices for each side
    published, ...      a workload that others published, on their number of devices: our seconds beside theirs

The model is Qwen3-4B, or with `model=qwen35_9b` that one. `--tiny` takes the tiny one, which also runs on a CPU;
`--random-weights` makes a checkpoint of the model's shapes, for a machine without the weights. Checks of fully_async
need two devices. Writes one JSON file and prints one table; the exit code is 1 if a check failed or differs. What a
failed check printed and logged stays in `failed/` beside that file.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

from app.config import RunConfig
from app.config.device import DeviceKind
from app.device import Device, device_of
from app.errors import ConfigError
from app.mode.plan.duration import step_seconds, step_tokens
from app.mode.plan.memory import plan_memory, with_memory_settings
from app.mode.plan.trainer_memory import plan_trainer
from app.model.architecture import Architecture, architecture_of
from app.utils.units import MIB
from tests.bench.machine import machine
from tests.compose import composed

DEADLINE_SECONDS = 1800.0  # of one check; engines of a new machine compile kernels at their first start
GRACE_SECONDS = 60.0  # from SIGTERM to SIGKILL
MEMORY_TOLERANCE = 1.1  # measured peak over planned
MISMATCH_BOUND = {"cpu": 1e-6, "cuda": 1e-2, "npu": 1e-2}  # mismatch/kl of on-policy steps; bfloat16 on cards
SLOWEST = 1.5  # measured over planned seconds
POLL_INTERVAL_S = 0.5
PASSED, DIFFERS, FAILED, SKIPPED = "ok", "differs", "failed", "not run"
LARGE = "model=qwen35_9b"
PACKAGES = ("torch", "sglang", "ray", "transformers")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One number and what it should be."""

    name: str
    measured: float | None  # None: the run did not report it
    expected: str  # for people
    met: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A workload whose seconds others published."""

    name: str
    kind: str
    devices: int
    overrides: tuple[str, ...]
    seconds: Mapping[str, float]  # by our metric
    source: str


PUBLISHED = (
    Published(
        "published",
        "cuda",
        8,
        ("experiment=cuda8_fully_async_4b",),
        {"time/step": 68.0, "time/generate": 23.8, "time/train": 16.8},
        "8 x H800, mean of 50 steps with warm-up and two evaluations: https://github.com/vllm-project/vime/issues/244",
    ),
    Published(
        "published_sync",
        "npu",
        4,
        ("experiment=npu4_fully_async_4b", "placement.max_staleness=0", "placement.in_flight=drain"),
        {"time/step": 178.3, "time/wait": 97.2, "time/train": 81.4},
        "4 NPUs of an Atlas A3, mean of 200 steps: https://github.com/vllm-project/vime/issues/358",
    ),
    Published(
        "published_async",
        "npu",
        4,
        ("experiment=npu4_fully_async_4b",),
        {"time/step": 104.0, "time/wait": 4.6, "time/train": 99.6},
        "4 NPUs of an Atlas A3, mean of 98 steps: https://github.com/vllm-project/vime/issues/358",
    ),
)


@dataclass(slots=True)
class Outcome:
    """What a check found."""

    name: str
    status: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    expectations: list[Expectation] = field(default_factory=list)
    published: dict[str, float] = field(default_factory=dict)  # seconds that others measured, beside those of `values`
    source: str = ""  # of `published`
    reason: str = ""  # why it failed or was not run


@dataclass(frozen=True, slots=True)
class Check:
    """A command, and how its result is read."""

    name: str
    module: str
    overrides: Sequence[str]
    read: Callable[[RunConfig, Path, str], tuple[dict[str, Any], list[Expectation]]]
    least_devices: int = 1
    published: Published | None = None


# --- the checks


def checks(kind: str, devices: int, model: Sequence[str], steps: int, path: str | None = None) -> list[Check]:
    """Return all checks, for this many devices. `path` is the folder of Qwen3-4B, for the published workloads."""
    base = [f"device={kind}", *model]
    trainers = max(1, devices // 2)
    colocate = [*base, "placement=colocate", f"placement.devices={min(devices, 4)}"]
    separate = [
        *base,
        "placement=fully_async",
        f"placement.trainer_devices={trainers}",
        f"placement.rollout_devices={max(1, devices - trainers)}",
        "placement.in_flight=retract",
    ]
    training = [f"steps={steps}", "eval.every=0", "eval.before_train=false", "checkpoint.every=0"]
    return [
        Check("doctor", "app", ["mode=doctor", *colocate], read_doctor),
        Check("parity", "app", ["mode=parity", *colocate], read_parity),
        Check("handovers", "tests.bench.first_hour_syncs", colocate, read_syncs),
        Check("syncs", "tests.bench.first_hour_syncs", separate, read_syncs, least_devices=2),
        Check("colocate", "app", [*colocate, *training], read_run),
        Check("fully_async", "app", [*separate, *training], read_run, least_devices=2),
        *(
            Check(
                each.name,
                "app",
                [*each.overrides, *([f"model.path={path}"] if path else []), *training],
                read_run,
                least_devices=each.devices,
                published=each,
            )
            for each in PUBLISHED
            if each.kind == kind
        ),
    ]


def read_doctor(_config: RunConfig, _folder: Path, output: str) -> tuple[dict[str, Any], list[Expectation]]:
    failing = [line.strip() for line in output.splitlines() if line.lower().startswith("fail")]
    return {"failing": failing}, []


def read_parity(_config: RunConfig, folder: Path, _output: str) -> tuple[dict[str, Any], list[Expectation]]:
    result = json.loads((folder / "parity.json").read_text())
    lines = result["comparisons"]
    expectations = [
        Expectation(line["what"], line["error"], f"at most {line['bound']:g}", line["passed"]) for line in lines
    ]
    return {"worst": max(line["error"] / line["bound"] for line in lines)}, expectations


def read_syncs(config: RunConfig, _folder: Path, output: str) -> tuple[dict[str, Any], list[Expectation]]:
    measured = json.loads(output.splitlines()[-1])
    expectations = []
    if "in_flight" in measured:
        spanning = measured["in_flight"]["of_several_versions"]
        killed = measured["killed"]
        expectations += [
            Expectation("completions of several versions", spanning, "at least 1", spanning >= 1),
            Expectation("a kill fell into a sync", float(killed["in_a_sync"]), "1", killed["in_a_sync"]),
        ]
        if killed["in_a_sync"]:
            right = killed["answers_as_version"] == killed["synced_version"]
            expected = f"{killed['synced_version']}, the synced one"
            expectations.append(Expectation("version after the kill", killed["answers_as_version"], expected, right))
    limit = config.rollout.start_timeout_s
    started = measured["start_seconds"]
    return measured, [*expectations, Expectation("start, s", started, f"at most {limit:g}", started <= limit)]


def read_run(config: RunConfig, folder: Path, _output: str) -> tuple[dict[str, Any], list[Expectation]]:
    """Compare a run's metrics with the plan. The first step is not counted: it compiles and warms up."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][1:]
    kind = config.device.kind.name
    measured = {name: [step[name] for step in steps if name in step] for name in SHOWN.split()}
    values = {name: median_high(found) for name, found in measured.items() if found}

    on_policy = [step["mismatch/kl"] for step in steps if step["staleness/max"] == 0]
    stalest = max(step["staleness/max"] for step in steps)
    bound = config.placement.max_staleness
    expectations = [Expectation("staleness/max", stalest, f"at most {bound}", stalest <= bound)]
    if on_policy:
        worst, limit = max(on_policy), MISMATCH_BOUND[kind]
        expectations.append(Expectation("mismatch/kl on policy", worst, f"at most {limit:g}", worst <= limit))
    device, model = device_of(config.device.kind), architecture_of(config.model)
    if model is not None:
        expectations += timing_expectations(config, device, model, values)
        expectations += memory_expectations(config, device, model, steps)
    return values, expectations


SHOWN = (
    "time/step time/generate time/train time/sync time/wait throughput/completion_tokens_per_second "
    "trainer/tokens_per_second trainer/tokens trainer/mfu completion/length_mean rollout/discarded_fraction "
    "sync/load_seconds"
)


def timing_expectations(
    config: RunConfig, device: Device, model: Architecture, values: Mapping[str, float]
) -> list[Expectation]:
    """The parts of a step against the plan's: generation at full length at most, training of as many tokens."""
    planned = step_seconds(config, device, model, plan_memory(config, device, model).engine)
    if planned is None:
        return []
    train = planned.train * values["trainer/tokens"] / step_tokens(config)
    parts = {"time/generate": planned.generate, "time/train": train, "time/sync": planned.sync}
    return [
        Expectation(name, values[name], f"the plan's {1000 * seconds:,.0f} ms, half more at most", met)
        for name, seconds in parts.items()
        if name in values
        for met in [values[name] <= SLOWEST * seconds]
    ]


def memory_expectations(
    config: RunConfig, device: Device, model: Architecture, steps: Sequence[Mapping[str, float]]
) -> list[Expectation]:
    """What a rank's allocator holds at most in training and in syncs, where a device says so, against the plan."""
    trainer = plan_trainer(with_memory_settings(config, device, model), device, model)
    held = sum(size for name, size in trainer.resident.items() if name != "runtime") + sum(trainer.offloadable.values())
    largest = max(sum(items.values()) for items in trainer.peaks.values())
    found = []
    for phase, used in (("train", largest), ("sync", sum(trainer.syncing.values()))):
        expected, name = (held + used) / MIB, f"memory/trainer_device_peak_{phase}_mib"
        measured = [step[name] for step in steps if name in step]
        if measured:
            peak = max(measured)
            met = peak <= MEMORY_TOLERANCE * expected
            found.append(Expectation(name, peak, f"the plan's {expected:,.0f}, 10 % above at most", met))
    return found


# --- running them


def run_check(check: Check, folder: Path, *, kind: str, devices: int) -> Outcome:
    """Run one check to its end or its deadline, and read its result."""
    if devices < check.least_devices:
        return Outcome(check.name, SKIPPED, reason=f"needs {check.least_devices} devices, this machine has {devices}")

    run_folder = folder / check.name
    run_folder.mkdir(parents=True)
    command = [sys.executable, "-m", check.module, *check.overrides]
    if check.module == "app":
        command.append(f"hydra.run.dir={run_folder / 'run'}")
    sys.stderr.write(f"{check.name}: {' '.join(command[1:])}\n")

    began = time.perf_counter()
    with DeviceMemory(kind) as used:
        code, output, errors = run_command(command, run_folder)
    outcome = Outcome(check.name, PASSED, seconds=round(time.perf_counter() - began, 1))
    if code != 0:
        outcome.status, outcome.reason = FAILED, last_line(errors) or last_line(output) or f"exit code {code}"
        return outcome

    config = composed(*(each for each in check.overrides if not each.startswith("mode=")))
    try:
        outcome.values, outcome.expectations = check.read(config, run_folder / "run", output)
    except (OSError, ValueError, KeyError, IndexError) as error:
        outcome.status, outcome.reason = FAILED, f"its result cannot be read: {type(error).__name__}: {error}"
        return outcome

    if check.published is not None:
        outcome.published, outcome.source = dict(check.published.seconds), check.published.source
    if used.peak_mib is not None and check.read is read_run:
        outcome.expectations.append(card_expectation(config, used.peak_mib))
    if not all(each.met for each in outcome.expectations):
        outcome.status = DIFFERS
    return outcome


def keep_logs(folder: Path, kept: Path) -> None:
    """Copy what a check printed and what its processes logged."""
    for path in (*folder.glob("*.txt"), *folder.rglob("*.log")):
        copy = kept / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def run_command(command: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a command in a session of its own; return exit code, stdout and stderr. Ends it at the deadline."""
    with (folder / "output.txt").open("wb") as output, (folder / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code = process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            code = end(process)
            errors.write(f"\nno end within {DEADLINE_SECONDS:g} s".encode())
        except BaseException:
            end(process)
            raise
    texts = [(folder / name).read_text(errors="replace") for name in ("output.txt", "errors.txt")]
    return code, texts[0], texts[1]


def end(process: subprocess.Popen[bytes]) -> int:
    """End a command as a user would, so that it ends what it started; kill it after a grace period."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return -1


class DeviceMemory:
    """The largest memory in use on any NVIDIA card during a block; None where nvidia-smi is missing."""

    def __init__(self, kind: str) -> None:
        self.peak_mib: float | None = None
        self._watches = kind == "cuda"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "DeviceMemory":
        if self._watches:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._watches:
            self._thread.join(10)

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._stop.wait(POLL_INTERVAL_S):
            try:
                found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
            except (OSError, subprocess.SubprocessError):
                return
            self.peak_mib = max(self.peak_mib or 0.0, *(float(line) for line in found.split()))


def card_expectation(config: RunConfig, peak_mib: float) -> Expectation:
    device = device_of(config.device.kind)
    model = architecture_of(config.model)
    assert model is not None
    planned = plan_memory(config, device, model).peak_phase.bytes / MIB
    met = peak_mib <= MEMORY_TOLERANCE * planned
    return Expectation("memory of a card, MiB", peak_mib, f"the plan's {planned:,.0f}, 10 % above at most", met)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


# --- the table


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per check, and one for each number that was compared."""
    lines = []
    for outcome in outcomes:
        head = f"{outcome.status:<8} {outcome.name:<12} {outcome.seconds:>7.1f} s"
        lines.append(f"{head}  {outcome.reason}".rstrip())
        for each in outcome.expectations:
            measured = "not reported" if each.measured is None else f"{each.measured:,.4g}"
            lines.append(f"  {' ' if each.met else '!'} {each.name}: {measured} (expected: {each.expected})")
        for name, value in outcome.values.items():
            text = f"{value:,.4g}" if isinstance(value, float) else str(value)
            theirs = outcome.published.get(name)
            beside = "" if theirs is None else f"  (published: {theirs:g} s, {value / theirs:.2f} of it)"
            lines.append(f"    {name}: {text}{beside}")
        if outcome.published:
            lines.append(f"    published: {outcome.source}")
    counts = {status: sum(each.status == status for each in outcomes) for status in (PASSED, DIFFERS, FAILED, SKIPPED)}
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return "\n".join(lines)


def hardware(kind: str) -> str:
    """Return the name of the first device."""
    if kind == "cpu":
        return "cpu"
    import torch

    device = device_of(DeviceKind[kind])
    return str(torch.get_device_module(device.torch_type).get_device_name(0))


def model_settings(options: argparse.Namespace, folder: Path, devices: int) -> list[str]:
    """Return the settings of the model, of short completions so that the hour suffices, and the user's."""
    if options.tiny:
        return list(options.settings)
    path = options.model
    if options.random_weights:
        from app.device.torchvision_shim import transformers
        from tests.bench.random_model import QWEN3_4B, qwen35_9b, save_random  # imports torch

        config = qwen35_9b() if LARGE in options.settings else transformers().Qwen3Config(**QWEN3_4B)
        path = save_random(folder / "model", config)
    settings = ["rollout.max_completion_tokens=1024", "rollout.max_prompt_tokens=512"]
    if LARGE not in options.settings:
        one = options.kind == "cuda" and devices == 1
        settings += ["experiment=cuda1_colocate_4b" if one else "model=qwen3_4b"]
    if path is not None:
        settings += [f"model.path={path}"]
    if options.random_weights:
        settings += ["data=arithmetic", "reward=exact"]
    return [*settings, *options.settings]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[each.name for each in DeviceKind])
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of every check")
    parser.add_argument("--tiny", action="store_true", help="the tiny model")
    parser.add_argument("--model", help="folder of Qwen3-4B; default: from the hub")
    parser.add_argument("--random-weights", action="store_true", help="the model's shapes without its weights")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: %(default)s)")
    parser.add_argument("--only", nargs="*", help="names of checks")
    parser.add_argument("--out", type=Path, default=Path("first_hour.json"), help="default: %(default)s")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the check that runs

    device = device_of(DeviceKind[options.kind])
    try:
        device.require()
    except ConfigError as error:
        parser.error(str(error))
    devices = 2 if options.kind == "cpu" else device.count()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = checks(options.kind, devices, model_settings(options, folder, devices), options.steps, options.model)
        if options.tiny or options.random_weights:  # their completions have other lengths than those of the workload
            found = [check for check in found if check.published is None]
        outcomes = []
        for check in found:
            if not options.only or check.name in options.only:
                outcomes.append(run_check(check, folder, kind=options.kind, devices=devices))
                if outcomes[-1].status == FAILED:
                    keep_logs(folder / check.name, options.out.parent / "failed" / check.name)
                write(options.out, options.kind, devices, outcomes)
    sys.stdout.write(table(outcomes) + "\n")
    sys.exit(0 if all(each.status in (PASSED, SKIPPED) for each in outcomes) else 1)


def write(out: Path, kind: str, devices: int, outcomes: Sequence[Outcome]) -> None:
    """Write the outcomes so far: a machine that is lost in mid-hour leaves those."""
    result = {
        "what": "first_hour",
        "hardware": hardware(kind),
        "devices": devices,
        "machine": machine(*PACKAGES),
        "checks": [asdict(each) for each in outcomes],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
