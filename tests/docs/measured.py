"""The measured numbers of the pages, rendered from the result files: `python -m tests.docs.measured` rewrites them.

A page has them between `<!-- measured: NAME -->` and `<!-- end -->`.
"""

import itertools
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from app.device import device_of
from app.mode.plan.memory import plan_memory
from app.model.architecture import architecture_of
from app.utils.units import GIB
from tests.bench.machine import spread
from tests.bench.real_models import LORA_SIDES, SIDES
from tests.bench.to_accuracy import SIDES as TO_ACCURACY
from tests.compose import composed
from tests.docs.markdown import PAGES, ROOT

RESULTS = ROOT / "tests" / "bench" / "results"
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
WIDTH = 128
CARDS = {"card_run_h100.json": "Qwen3-4B on one H100", "card_run_h200.json": "Qwen3.5-9B on one H200, SGD"}

Result = Mapping[str, Any]


def load(stem: str) -> Result:
    return json.loads((RESULTS / f"{stem}.json").read_text())


def number(value: Any, digits: str) -> str:
    """Format a spread as `median (least–largest)`, and a bare median."""
    if isinstance(value, Mapping):
        median, least, largest = (format(value[name], digits) for name in ("median", "min", "max"))
        return f"{median} ({least}–{largest})"
    return format(value, digits)


def row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def header(*cells: str) -> str:
    return row(*cells) + f"|{'---|' * len(cells)}\n"


def prose(text: str) -> str:
    return textwrap.fill(text, WIDTH) + "\n"


def rounds_of(result: Result) -> int:
    rounds = result.get("rounds", 1)
    return rounds if isinstance(rounds, int) else len(rounds)


# --- blocks


TRAINERS = ("ours", "plain", "plain_onednn", "naive")


def trainer() -> str:
    result = load("trainer")
    table = header("", "tokens/s", "memory above the model's own, MiB", "positions", "TFLOPs of matrix products")
    for way in TRAINERS:
        measured = result[way]
        work = result["work"][way]
        cells = (number(measured["tokens_per_second"], ".0f"), number(measured["mib_above_model"], ",.0f"))
        table += row(f"`{way}`", *cells, f"{work['positions']:,}", f"{work['matrix_tflops']:.2f}")

    speeds = ", ".join(
        f"{number(result[f'ours_over_{way}']['tokens_per_second'], '.2f')} × that of `{way}`" for way in TRAINERS[1:]
    )
    return f"{table}\n" + prose(f"Tokens/s of `ours`: {speeds}. {conditions(result, TRAINERS)}")


def conditions(result: Result, sides: Sequence[str]) -> str:
    others = max(each[side]["before"]["busy_cores"] for each in result["rounds"] for side in sides)
    return f"Rounds: {rounds_of(result)}; other work at most {others} cores."


RUN_COLUMNS = {"tokens_per_second": ".0f", "seconds_per_step": ".1f", "generate_seconds": ".1f", "peak_pss_mib": ",.0f"}
RUN_COLUMN_TITLES = ("completion tokens/s", "seconds per step", "of them generating", "peak memory (PSS), MiB")


def runs_table(title: str, runs: Mapping[str, Result]) -> str:
    rows = (
        row(f"`{side}`", *(number(run[name], digits) for name, digits in RUN_COLUMNS.items()))
        for side, run in runs.items()
    )
    return header(title, *RUN_COLUMN_TITLES) + "".join(rows)


def real_models() -> str:
    return sides_of_real_models(load("real_models"), SIDES)


def real_models_lora() -> str:
    return sides_of_real_models(load("real_models_lora"), LORA_SIDES)


def sides_of_real_models(result: Result, all_sides: Sequence[str]) -> str:
    sides = [side for side in all_sides if side in result]
    table = runs_table(result["model"], {side: result[side] for side in sides})
    speeds, sizes = (
        ", ".join(f"`{side}` {number(ratio, '.2f')} ×" for side, ratio in result[name].items())
        for name in ("tokens_per_second_over_trls_better_dtype", "peak_pss_mib_over_trls_better_dtype")
    )
    return f"{table}\n" + prose(
        f"Tokens/s over TRL's: {speeds}. Memory over TRL's: {sizes}. Counted steps a round: {result['steps']}. "
        f"{conditions(result, sides)}"
    )


LEARNING_TABLES = (("colocate", "fully_async"), ("3 updates", "staleness 4"), ("drain", "retract", "in_place"))


def learning() -> str:
    """A table for each set of columns; the name of a run is that of its row and its column."""
    after = {run["name"]: f"{100 * run['last']:.1f} %" for run in load("learning")["runs"]}
    tables = []
    for columns in LEARNING_TABLES:
        rows = sorted({name.removesuffix(f" {end}") for name in after for end in columns if name.endswith(f" {end}")})
        cells = (row(name, *(after.get(f"{name} {column}", "–") for column in columns)) for name in rows)
        tables.append(header("accuracy after", *columns) + "".join(cells))
    seeds = {name: [after[f"{name} seed {seed}"] for seed in (1, 2)] for name in ("grpo", "partial")}
    partial = ", ".join([after["partial seed 0"], *seeds["partial"]])
    plain = ", ".join([after["grpo colocate"], *seeds["grpo"]])
    text = f"Three seeds of `grpo` in colocate: {plain}; with partial rollouts, `placement.max_staleness=1`: {partial}."
    return "\n".join([*tables, prose(text)])


def to_accuracy() -> str:
    """Minutes to the target and to the end of the runs of TRL and ours, seed by seed."""
    result = load("to_accuracy")
    runs, target = result["runs"], result["target"]
    steps = ", ".join(str(step) for step, *_ in next(iter(runs.values()))["curve"][1:])
    table = header("", f"minutes to {target:.0%}", "to the last step", f"accuracy after steps {steps}")
    for name in sorted(runs, key=lambda name: (runs[name]["seed"], TO_ACCURACY.index(runs[name]["side"]))):
        curve = runs[name]["curve"]
        reached = seconds_to(target, runs[name])
        minutes = f"{reached / 60:.1f}" if reached else "–"
        table += row(name, minutes, f"{curve[-1][1] / 60:.1f}", ", ".join(f"{found:.0%}" for *_, found in curve[1:]))
    return f"{table}\n{shares_of_trl()}"


def seconds_to(target: float, run: Result) -> float | None:
    return next((seconds for _, seconds, accuracy in run["curve"] if accuracy >= target), None)


def shares_of_trl() -> str:
    """Our time over TRL's with the same seed to the last step, and that of the mean curves to the target."""
    result = load("to_accuracy")
    runs, target = result["runs"], result["target"]
    texts = []
    for side in TO_ACCURACY[1:]:
        ours = [run for run in runs.values() if run["side"] == side]
        theirs = [runs[f"trl seed {run['seed']}"] for run in ours]
        ends = spread((our["curve"][-1][1] / their["curve"][-1][1] for our, their in zip(ours, theirs, strict=True)), 2)
        minutes = [mean_seconds_to(target, each) / 60 for each in (ours, theirs)]
        texts.append(
            f"`{side}` takes {number(ends, '.2f')} of TRL's time to the last step, and its mean curve "
            f"reaches {target:.0%} after {minutes[0]:.1f} minutes, TRL's after {minutes[1]:.1f}"
        )
    return prose(f"{'; '.join(texts)}.")


def mean_seconds_to(target: float, runs: Sequence[Result]) -> float:
    """Return when the mean curve reaches the target, on the line between two evaluations."""
    together = zip(*(run["curve"] for run in runs), strict=True)
    means = [[statistics.fmean(column) for column in zip(*points, strict=True)] for points in together]
    for (_, began, low), (_, ended, high) in itertools.pairwise(means):
        if high >= target:
            return began + (target - low) / (high - low) * (ended - began)
    raise ValueError(f"the mean curve does not reach {target:.0%}")


def learning_real() -> str:
    runs = sorted(load("learning_real")["runs"], key=lambda run: run["overrides"])
    steps = sorted({step for run in runs for step in run["accuracies"]}, key=int)
    table = header("run", *(f"step {step}" for step in steps), "minutes")
    for run in runs:
        shown = (run["accuracies"].get(step) for step in steps)
        accuracies = ("" if accuracy is None else f"{100 * accuracy:.0f} %" for accuracy in shown)
        minutes = round(run["run_seconds"] / 60) if "run_seconds" in run else "–"
        table += row(f"`{run['overrides']}`", *accuracies, minutes)
    return table


def gsm8k() -> str:
    (run,) = load("gsm8k")["runs"]
    table = header("", *(f"step {step}" for step in run["accuracies"]))
    table += row("accuracy", *(f"{100 * accuracy:.0f} %" for accuracy in run["accuracies"].values()))
    rewards = run["rewards"]
    part = len(rewards) // 3
    first, last = (100 * statistics.fmean(each) for each in (rewards[:part], rewards[-part:]))
    text = (
        f"Of the samples at temperature 0.7, {first:.0f} % were right in the first {part} of {run['steps']} steps and "
        f"{last:.0f} % in the last {part}."
    )
    return f"{table}\n" + prose(text)


LONG_TAILS = ("longest completion 3 steps", "longest completion 6 steps")  # of the overlap bench


def overlap() -> str:
    presets = load("overlap")["presets"]
    modes = {
        "colocate": "colocate",
        "colocate, 1": "colocate staleness 1",
        "colocate, 2": "colocate staleness 2",
        "colocate, 4": "colocate staleness 4",
        "0, streamed": "staleness 0 streamed",
        "1, drained": "staleness 1 drained",
        "1, in place": "staleness 1",
        "1, retracted": "staleness 1 retracted",
        "4, in place": "staleness 4",
        "4, retracted": "staleness 4 retracted",
    }
    table = header("", *modes)
    for preset in ("generation takes twice as long", "training takes twice as long", "balanced", *LONG_TAILS):
        table += row(preset, *(f"{presets[preset][mode]['over_ideal']:.2f}" for mode in modes.values()))

    lost = "; ".join(
        f"{preset}, {mode}: {presets[preset][mode]['discarded_sampling_fraction']:.0%}"
        for preset in LONG_TAILS
        for mode in presets[preset]
        if presets[preset][mode]["discarded_sampling_fraction"] >= 0.005
    )
    return f"{table}\n" + prose(f"Sampling that is discarded because a completion outlasts the bound: {lost}.")


UNITS = {"compute": (1e12, "TFLOP"), "memory": (1e9, "GB"), "link": (1e9, "GB over the link")}


def at_peak(part: Result) -> str:
    scale, unit = UNITS[part["bound"]]
    return f"{1000 * part['seconds']:,.1f} ms: {part[part['bound']] / scale:,.0f} {unit}" if part["seconds"] else "–"


def roofline() -> str:
    """Presets at the peaks of their devices, and a card's run beside its own."""
    cases = load("roofline")["cases"]
    shown = [case for name, case in cases.items() if name not in CARDS]
    table = header("", *(name for name in cases if name not in CARDS))
    sizes = [f"{each['microbatches']:.0f} × {each['tokens']:,} tokens, `{each['recomputation']}`" for each in shown]
    table += row("microbatches", *sizes)
    for name in shown[0]["parts"]:
        cells = [at_peak(each["parts"][name]) for each in shown]
        table += row(name, *cells) if set(cells) != {"–"} else ""
    for name in shown[0]["totals"]:
        table += row(f"**{name}**", *(f"{each['totals'][name]:,.4g}" for each in shown))

    for card, title in CARDS.items():
        peak, (*_, run) = cases[card], load(card.removesuffix(".json"))["runs"].values()
        table += "\n" + header(title, "at the peaks", "`mode=plan`", "measured")
        for name, series in (("generate, s", "time/generate"), ("train, s", "time/train"), ("MFU", "trainer/mfu")):
            measured = number(spread(run[series][1:], 2), ".2f")  # the first step compiles
            table += row(name, f"{peak['totals'][name]:.2f}", f"{peak['plan'][name]:.2f}", measured)
    return table


def summary() -> str:
    """The trainer's ratios for README."""
    result = load("trainer")
    ratios = result["ours_over_plain_onednn"]
    speed, memory = (f"{ratios[name]['median']:.2f}" for name in ("tokens_per_second", "mib_above_model"))
    return prose(
        f"On two CPU cores the trainer alone has {speed} times the tokens/s of a transformers loop that sorts by "
        f"length, pads each microbatch and uses the same matrix products, with {memory} of its memory (medians of "
        f"{rounds_of(result)} rounds)."
    )


def peak(preset: str) -> str:
    """The memory peak of an accelerator's experiment, as `mode=plan` estimates it."""
    config = composed(f"experiment={preset}")
    device, model = device_of(config.device.kind), architecture_of(config.model)
    assert model is not None
    plan = plan_memory(config, device, model)
    phase, total = plan.peak_phase, plan.capacity.bytes / GIB
    used, left = (f"{each:.2f}" for each in (phase.bytes / GIB, total - phase.bytes / GIB))
    return f"Estimated memory peak: {phase.device}, {phase.name}, {used} of {total:g} GiB, {left} GiB left.\n"


BLOCKS: dict[str, Callable[[], str]] = {
    f"peak_{each.stem}": partial(peak, each.stem)
    for device in ("cuda", "npu")
    for each in (ROOT / "conf" / "experiment").glob(f"{device}*.yaml")
}
BLOCKS |= {
    block.__name__: block
    for block in (
        trainer,
        real_models,
        real_models_lora,
        to_accuracy,
        shares_of_trl,
        learning,
        learning_real,
        gsm8k,
        overlap,
        summary,
        roofline,
    )
}


def rewritten(text: str) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[4]}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (current := rewritten(text)) != text:
            page.write_text(current)


if __name__ == "__main__":
    main()
