"""The measured numbers of the pages, rendered from the result files: `python -m tests.docs.measured` rewrites them.

A page has them between `<!-- measured: NAME -->` and `<!-- end -->`. A result that does not exist is not measured yet.
"""

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.machine import spread
from tests.bench.real_models import LORA_SIDES, SIDES
from tests.docs.markdown import ROOT

RESULTS = ROOT / "tests" / "bench" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "placements.md",
    ROOT / "docs" / "weight_sync.md",
    ROOT / "docs" / "experiments" / "cpu1_smollm2.md",
)
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)

VIRTUAL_TIME = ("overlap", "npu_counts")  # results that no other work of the machine changes

Result = Mapping[str, Any]


def load(stem: str) -> Result:
    return json.loads((RESULTS / f"{stem}.json").read_text())


def number(value: Any, digits: str) -> str:
    """Format a spread as `median (least–largest)`, and a bare median."""
    if isinstance(value, Mapping):
        median, least, largest = (format(value[name], digits) for name in ("median", "min", "max"))
        return f"{median} ({least}–{largest})"
    return format(value, digits)


def median(value: Any, digits: str) -> str:
    return format(value["median"] if isinstance(value, Mapping) else value, digits)


def row(*cells: Any) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def header(*cells: str) -> str:
    return row(*cells) + f"|{'---|' * len(cells)}\n"


def load_average(result: Result) -> str:
    """The load average before the measurement where that is known, else at its end."""
    recorded = result.get("before") or result["machine"]
    return str(recorded["load_average"]) if isinstance(recorded, Mapping) else "not recorded"


def conditions(result: Result) -> tuple[str, str]:
    """The rounds of a result and its load average; of one that keeps its rounds, the least and the largest of them."""
    rounds = result.get("rounds", 1)
    if isinstance(rounds, int):
        return str(rounds), load_average(result)
    loads = [each["before"]["load_average"] for each in rounds]
    return str(len(rounds)), f"{min(loads)}–{max(loads)}"


def start_conditions(result: Result) -> tuple[str, str]:
    """The rounds of the start bench and the largest load average before one of its measurements."""
    loads = [way["before"]["load_average"] for each in result["rounds"] for way in each.values()]
    return str(len(result["rounds"])), f"{min(loads)}–{max(loads)}"


# --- blocks


def claims() -> str:
    """The small benchmarks, a line each."""
    delta, sync, generation, memory, controller, turns, start, code = (
        load(stem) for stem in ("delta", "weight_sync", "generation", "memory", "controller", "turns", "start", "code")
    )
    programs = (f"`{kind}` {number(value, '.0f')}" for kind, value in code["programs_per_second"].items())
    matmul = load("matmul")["products"]
    seconds = {name: number(value, ".2f") for name, value in sync["seconds"].items()}
    tables = {(each["vocabulary"], each["tokens"]): each for each in memory["table"]}
    heads = "; ".join(
        f"vocabulary {vocabulary:,}: {number(each['chunked_mib'], ',')} of {number(each['full_mib'], ',')} MiB"
        for (vocabulary, tokens), each in tables.items()
        if tokens == 2048
    )
    wide = "qwen3 of 6 layers, 256 wide"
    attention = "; ".join(
        f"{requests}: {number(generation['tiny'][requests]['batched_over_native'], '.1f')} × (tiny), "
        f"{number(generation[wide][requests]['batched_over_native'], '.1f')} × (6 layers, 256 wide)"
        for requests in ("64 requests", "128 requests")
    )
    lines = [
        (
            "delta",
            "delta sync vs. full sync: 596 M parameters, lr 1e-6",
            f"{number(delta['bytes_over_full'], '.3f')} of the bytes; "
            f"{number(delta['seconds_over_full'], '.2f')} of the time",
            *conditions(delta),
        ),
        *link(),
        (
            "weight_sync",
            "sync of 1.19 GB to one engine, seconds",
            f"IPC {seconds['ipc']}; collective {seconds['collective']}; via disk {seconds['disk']}; "
            f"a bare memory copy {seconds['copy']}; a bare broadcast {seconds['broadcast']}",
            *conditions(sync),
        ),
        (
            "generation",
            "SGLang on a CPU with our batched attention vs. its own, completion tokens/s",
            attention,
            *conditions(generation),
        ),
        (
            "memory",
            "memory of forward and backward over 2,048 tokens, chunked LM head vs. full logits (one layer, 128 wide)",
            heads,
            *conditions(memory),
        ),
        (
            "controller",
            "driver CPU per completion of 8,000 tokens, 1,000 simulated engines",
            driver_cpu(controller),
            *conditions(controller),
        ),
        (
            "matmul",
            "float32 products by oneDNN over those of torch, which are MKL's, on an AMD CPU with AVX-512",
            "; ".join(f"{name} {number(each['onednn_over_mkl'], '.1f')} ×" for name, each in matmul.items()),
            *conditions(load("matmul")),
        ),
        (
            "turns",
            f"driver CPU per turn of an episode: {turns['turns_per_episode']} turns of "
            f"{turns['sampled_tokens_per_turn']} sampled and {turns['observed_tokens_per_turn']} observed tokens, real "
            "environment workers",
            f"{number(turns['driver_cpu_us_per_turn'], '.0f')} µs, Ray's own calls not counted",
            *conditions(turns),
        ),
        (
            "start",
            "start of an engine on a CPU, seconds until it answers: forked from an import, and importing SGLang itself",
            f"{number(start['forked'], '.1f')}, beside another one {number(start['second'], '.1f')}; importing "
            f"{number(start['imports'], '.1f')}",
            *start_conditions(start),
        ),
        (
            "start",
            "`python -m app`, seconds until the first trained step: with a fork server, and without",
            f"{number(start['run_forked'], '.1f')}; without {number(start['run_imports'], '.1f')}",
            *start_conditions(start),
        ),
        (
            "code",
            f"`reward=code`, short programs a second through the scorer, {code['workers']} workers",
            "; ".join(programs),
            *conditions(code),
        ),
    ]
    table = header("claim", "measured", "rounds", "load average", "command", "result")
    for stem, *cells in lines:
        table += row(*cells, f"`python -m tests.bench.{stem}`", f"`tests/bench/results/{stem}.json`")
    return table


def driver_cpu(result: Result) -> str:
    """The driver's CPU time per completion, with Ray's share where it was counted."""
    if "of_them_ray" not in result:
        return f"{number(result['driver_cpu_us_per_completion'], '.0f')} µs, Ray's own calls not counted"
    whole, ray, rest = (
        number(result[name], ".0f") for name in ("driver_cpu_us_per_completion", "of_them_ray", "without_ray")
    )
    return f"{whole} µs of the whole process: {ray} µs Ray's (calls, pickling, object store), {rest} µs the rest"


def link() -> list[tuple[str, ...]]:
    """The line of the benchmark over a link, which needs root: not measured on every machine."""
    if not (RESULTS / "link.json").exists():
        return []
    result = load("link")
    seconds = {mode: number(value, ".2f") for mode, value in result["seconds"].items()}
    claim = "the same over a link of 1 Gbit/s between two network namespaces, seconds"
    measured = (
        f"full {seconds['full']}; delta {seconds['delta']}: {number(result['seconds_over_full'], '.3f')} of the time"
    )
    return [("link", claim, measured, *conditions(result))]


TRAINERS = ("ours", "plain", "plain_onednn", "naive")


def trainer() -> str:
    result = load("trainer")
    table = header("", "tokens/s", "memory above the model's own, MiB", "positions", "TFLOPs of matrix products")
    for way in TRAINERS:
        measured = result[way]
        work = result["work"][way]
        cells = (number(measured["tokens_per_second"], ".0f"), number(measured["mib_above_model"], ",.0f"))
        table += row(f"`{way}`", *cells, f"{work['positions']:,}", f"{work['matrix_tflops']:.2f}")
    text = f"{trainer_ratios(number)} {load_sentence(result, TRAINERS)}"
    return f"{table}\n{textwrap.fill(text, 128)}\n"


def trainer_ratios(show: Callable[[Any, str], str]) -> str:
    result = load("trainer")
    plain, onednn, naive = (result[f"ours_over_{baseline}"] for baseline in TRAINERS[1:])
    return (
        f"`ours` has {show(plain['tokens_per_second'], '.2f')} × the tokens/s of `plain` with "
        f"{show(plain['mib_above_model'], '.2f')} of its memory and {plain['matrix_tflops']:.2f} of its matrix FLOPs, "
        f"and {show(onednn['tokens_per_second'], '.2f')} × the tokens/s of `plain_onednn`. "
        f"Over `naive` it has {show(naive['tokens_per_second'], '.1f')} × the tokens/s with "
        f"{show(naive['mib_above_model'], '.2f')} of its memory and {naive['matrix_tflops']:.2f} of its matrix FLOPs."
    )


def load_sentence(result: Result, sides: tuple[str, ...]) -> str:
    before = [each[side]["before"] for each in result["rounds"] for side in sides]
    loads = [each["load_average"] for each in before]
    others = max(each["busy_cores"] for each in before)
    return (
        f"Rounds: {len(result['rounds'])}; load average before a measurement {min(loads)}–{max(loads)}, "
        f"the benchmark's own last minute included; other work at most {others} cores."
    )


RUN_COLUMNS = {"tokens_per_second": ".0f", "seconds_per_step": ".1f", "generate_seconds": ".1f", "peak_pss_mib": ",.0f"}
RUN_COLUMN_TITLES = ("completion tokens/s", "seconds per step", "of them generating", "peak memory (PSS), MiB")


def end_to_end() -> str:
    result = load("end_to_end")
    names, table = RUN_COLUMNS, header("", *RUN_COLUMN_TITLES)
    for shown, side in (("`colocate`", "ours"), ("`fully_async`", "ours_async"), ("TRL, microbatch of 8", "trl")):
        table += row(shown, *(number(result[side][name], digits) for name, digits in names.items()))
    for setting, run in result["tuning"].items():
        table += row(f"TRL, {setting} (one run)", *(number(run[name], digits) for name, digits in names.items()))

    ratios, both = result["ours_over_trl"], result["ours_async_over_trl"]
    text = (
        f"`colocate` has {number(ratios['tokens_per_second'], '.2f')} × TRL's tokens/s with "
        f"{number(ratios['peak_pss_mib'], '.2f')} of its memory, `fully_async` "
        f"{number(both['tokens_per_second'], '.2f')} × with {number(both['peak_pss_mib'], '.2f')}. "
        f"{load_sentence(result, ('ours', 'ours_async', 'trl'))}"
    )
    return f"{table}\n{textwrap.fill(text, 128)}\n"


def real_models() -> str:
    return sides_of_real_models(load("real_models"), SIDES)


def real_models_lora() -> str:
    return sides_of_real_models(load("real_models_lora"), LORA_SIDES)


def sides_of_real_models(result: Mapping[str, Any], all_sides: Sequence[str]) -> str:
    sides = [side for side in all_sides if side in result]
    table = header(result["model"], *RUN_COLUMN_TITLES)
    for side in sides:
        table += row(f"`{side}`", *(number(result[side][name], digits) for name, digits in RUN_COLUMNS.items()))

    speeds, sizes = (
        ratios_of_sides(result[f"{name}_over_trls_better_dtype"]) for name in ("tokens_per_second", "peak_pss_mib")
    )
    alike = {side: over_trl_alike(result["rounds"], side) for side in sides if not side.startswith("trl")}
    text = (
        f"Tokens/s over TRL's: {speeds}. Over TRL in the same dtype: {ratios_of_sides(alike)}. "
        f"Memory over TRL's: {sizes}. Counted steps a round: {result['steps']}. "
        f"{load_sentence(result, tuple(sides))}"
    )
    missing = [side for side in all_sides if side not in sides]
    text += f" Not measured: {', '.join(missing)}." if missing else ""
    return f"{table}\n{textwrap.fill(text, 128)}\n"


def over_trl_alike(rounds: Sequence[Mapping[str, Any]], side: str) -> dict[str, float]:
    """The tokens/s of a side over those of TRL in the same dtype, both with adapters or without, in the same round."""
    trl = f"trl {side.partition(' ')[2]}"
    return spread((each[side]["tokens_per_second"] / each[trl]["tokens_per_second"] for each in rounds), 2)


def ratios_of_sides(ratios: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"`{side}` {number(ratio, '.2f')} ×" for side, ratio in ratios.items())


PLACEMENT_RUNS = {"fully_async": "grpo fully_async", "colocate": "grpo colocate"}  # of the learning bench


def learning() -> str:
    table = header("run", "steps", "accuracy before", "after")
    for run in sorted(load("learning")["runs"], key=lambda run: run["overrides"]):
        table += row(f"`{run['overrides']}`", run["steps"], f"{100 * run['first']:.1f} %", f"{100 * run['last']:.1f} %")
    return table


def learning_real() -> str:
    runs = sorted(load("learning_real")["runs"], key=lambda run: run["overrides"])
    steps = list(runs[0]["accuracies"])
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
    return f"{table}\n{textwrap.fill(text, 128)}\n"


def placements() -> str:
    runs = {run["name"]: run for run in load("learning")["runs"]}
    shown = ((placement, runs.get(run)) for placement, run in PLACEMENT_RUNS.items())
    return "".join(f"- `{placement}`: {speed(run) if run else 'Not measured yet.'}\n" for placement, run in shown)


def speed(run: Result) -> str:
    return (
        f"{run['completion_tokens_per_second']:,} completion tokens/s, {run['run_seconds']} s in all "
        f"(load average {load_average(run)})"
    )


LONG_TAILS = ("longest completion 3 steps", "longest completion 6 steps")  # of the overlap bench


def overlap() -> str:
    presets = load("overlap")["presets"]
    modes = {
        "colocate": "colocate",
        "0, streamed": "staleness 0 streamed",
        "1, drained": "staleness 1 drained",
        "1, in flight": "staleness 1",
        "4, in flight": "staleness 4",
    }
    table = header("", *modes)
    for preset in ("generation takes twice as long", "training takes twice as long", "balanced", *LONG_TAILS):
        table += row(preset, *(f"{presets[preset][mode]['over_ideal']:.2f}" for mode in modes.values()))

    lost = "; ".join(
        f"{preset}, staleness {bound}: {presets[preset][f'staleness {bound}']['discarded_sampling_fraction']:.0%}"
        for preset in LONG_TAILS
        for bound in (1, 2, 4)
    )
    text = f"Sampling that is discarded because a completion outlasts the bound: {lost}."
    return f"{table}\n{textwrap.fill(text, 128)}\n"


def npu_counts() -> str:
    result = load("npu_counts")
    text = header("", "kernels forward", "kernels backward", "GB forward", "GB backward")
    for model, found in result["models"].items():
        for way, layers in found["counts"].items():
            for kind, passes in layers.items():
                kernels = [f"{passes[each]['kernels']:,}" for each in ("forward", "backward")]
                sizes = [f"{passes[each]['bytes'] / 1e9:,.1f}" for each in ("forward", "backward")]
                text += row(f"{model}, a layer with {kind}, {way}", *kernels, *sizes)
        for way, sums in found["microbatch"].items():
            layers_of_all = sum(found["layers"].values())
            text += row(
                f"**{model}, {layers_of_all} layers, recomputed, {way}**",
                f"**{sums['kernels']:,} in all**",
                "",
                f"**{sums['bytes'] / 1e9:,.0f} in all**",
                "",
            )
    return text


def probe() -> str:
    result = load("probe")
    shares = result["quickstart"]
    rows = [
        row(placement, *(number(shares[placement][name], ".2%") for name in ("of_step_time", "of_sampled_tokens")))
        for placement in shares
    ]
    largest = max(result["presets"].values())
    return (
        header("quickstart, 60 steps", "of the steps' time", "of the sampled tokens")
        + "".join(rows)
        + f"\nOf the presets' computation it is at most {100 * largest:.4f} %, by count (`tests.bench.probe`).\n"
    )


def missed() -> str:
    """The targets that the results miss."""
    delta, sync, trainer_result, start, controller, code = (
        load(stem) for stem in ("delta", "weight_sync", "trainer", "start", "controller", "code")
    )
    plain = trainer_result["ours_over_plain"]
    targets = trainer_result["targets"]
    at_most = [
        ("delta sync over full sync, seconds", delta["seconds_over_full"], delta["targets"]["seconds_over_full"]),
        ("delta sync over full sync, bytes", delta["bytes_over_full"], delta["targets"]["bytes_over_full"]),
        (
            "collective sync over broadcast and copy, seconds",
            sync["collective_over_broadcast_and_copy"],
            sync["targets"]["collective_over_broadcast_and_copy"],
        ),
        ("IPC sync less 50 ms over a memory copy, seconds", sync["ipc_over_copy"], sync["targets"]["ipc_over_copy"]),
        ("driver CPU per completion, µs", controller["driver_cpu_us_per_completion"], controller["target_us"]),
        ("start of a forked engine, seconds", start["forked"], start["targets"]["forked"]),
        ("first trained step of `python -m app`, seconds", start["run_forked"], start["targets"]["run_forked"]),
        ("trainer over `plain`, memory", plain["mib_above_model"], targets["ours_over_plain mib_above_model"]),
    ]
    at_least = [
        (
            "trainer over `plain`, tokens/s",
            plain["tokens_per_second"],
            targets["ours_over_plain tokens_per_second"],
        ),
        *(
            (f"programs a second in `{kind}`", rate, code["targets"][kind])
            for kind, rate in code["programs_per_second"].items()
        ),
    ]
    if (RESULTS / "link.json").exists():
        over_link = load("link")
        name = "delta sync over full sync over 1 Gbit/s, seconds"
        at_most.append((name, over_link["seconds_over_full"], over_link["targets"]["seconds_over_full"]))
    if (RESULTS / "end_to_end.json").exists():
        whole = load("end_to_end")
        for placement, side, least in (("colocate", "ours", 4.0), ("fully_async", "ours_async", 6.0)):
            ratios = whole[f"{side}_over_trl"]
            at_least.append((f"{placement} over TRL, tokens/s", ratios["tokens_per_second"], least))
            at_most.append((f"{placement} over TRL, memory", ratios["peak_pss_mib"], 0.5))
    if (RESULTS / "real_models.json").exists():
        speeds = load("real_models")["tokens_per_second_over_trls_better_dtype"]
        targets = {"colocate float32": 2.5, "colocate bfloat16": 4.0, "fully_async float32": 3.0}
        at_least += [
            (f"`{side}` over TRL on SmolLM2-135M, tokens/s", speeds[side], targets[side])
            for side in targets
            if side in speeds
        ]

    if (RESULTS / "real_models_lora.json").exists():
        sizes = load("real_models_lora")["peak_pss_mib_over_trls_better_dtype"]
        at_most.append(("adapters of Qwen2.5-0.5B over TRL with PEFT, memory", sizes["colocate float32 lora"], 1.0))

    found = [
        f"- {name}: {median(value, '.3g')}, target at most {target}\n"
        for name, value, target in at_most
        if float(median(value, ".3f")) > target
    ]
    found += [
        f"- {name}: {median(value, '.2f')}, target at least {target}\n"
        for name, value, target in at_least
        if float(median(value, ".3f")) < target
    ]
    return "".join(found)


def summary() -> str:
    """The trainer's ratios for README."""
    rounds = len(load("trainer")["rounds"])
    text = (
        "The trainer alone on two CPU cores against transformers loops with the same positions a microbatch, medians "
        f"of {rounds} rounds. `plain` sorts by length, pads per microbatch and computes the logits of completions "
        "only, `plain_onednn` with the faster matrix products that ours uses on AMD's CPUs; `naive` pads everything to "
        f"the longest trajectory and computes all logits. {trainer_ratios(median)}"
    )
    return textwrap.fill(text, 120) + "\n"


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block
    for block in (
        claims,
        trainer,
        end_to_end,
        real_models,
        real_models_lora,
        learning,
        learning_real,
        gsm8k,
        placements,
        overlap,
        npu_counts,
        probe,
        missed,
        summary,
    )
}


def render(name: str) -> str:
    try:
        return BLOCKS[name]()
    except FileNotFoundError as missing:
        return f"Not measured yet: there is no `{Path(missing.filename).name}`.\n"


def rewritten(page: Path) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}{render(found[2])}{found[4]}", page.read_text())


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page))


if __name__ == "__main__":
    main()
