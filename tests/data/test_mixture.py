"""Several training sets, mixed by weight."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.config.data import DataConfig, EvalSetConfig, TrainSetConfig
from app.data.cursor import PromptCursor
from app.data.prompts import build
from app.data.rows import load
from app.types import Prompt
from tests.refusals import refused

WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.5}


def cursor(weights: dict[str, float] = WEIGHTS, *, rows: int = 7, seed: int = 0) -> PromptCursor:
    prompts = [
        Prompt(id=f"{name}/{row}", token_ids=np.array([row], dtype=np.int32), answer="1", source=name)
        for name in weights
        for row in range(rows)
    ]
    return PromptCursor(prompts, seed=seed, shuffle=True, weights=weights)


def ids(stream: PromptCursor, count: int) -> list[str]:
    return [prompt.id for prompt in stream.take(count)]


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    count=st.integers(1, 300),
    seed=st.integers(0, 2**31 - 1),
)
def test_at_any_time_every_set_is_within_two_prompts_of_its_share(weights: list[float], count: int, seed: int) -> None:
    named = {f"set{index}": weight for index, weight in enumerate(weights)}
    drawn = Counter(prompt.source for prompt in cursor(named, seed=seed).take(count))
    for name, weight in named.items():
        assert abs(drawn[name] - count * weight / sum(weights)) < 2


def test_each_set_has_whole_epochs_of_its_own() -> None:
    drawn = ids(cursor(rows=7), 35)  # 20 of a, 10 of b, 5 of c
    of_a = [each for each in drawn if each.startswith("a/")]
    assert sorted(of_a[:7]) == [f"a/{row}@0" for row in range(7)]
    assert sorted(of_a[7:14]) == [f"a/{row}@1" for row in range(7)]
    assert [each.split("@")[0] for each in of_a[:7]] != [each.split("@")[0] for each in of_a[7:14]]


@given(before=st.integers(0, 60), requeued=st.sets(st.integers(0, 59)), after=st.integers(1, 60))
def test_a_resumed_mixture_continues_identically(before: int, requeued: set[int], after: int) -> None:
    saved = cursor()
    dispatched = ids(saved, before)
    returned = [dispatched[index] for index in sorted(requeued) if index < before]
    saved.requeue(returned)
    saved.mark_consumed([each for each in dispatched if each not in returned])
    restored = cursor()
    restored.restore(json.loads(json.dumps(saved.state())))
    assert ids(restored, after) == ids(saved, after)


def test_other_weights_do_not_match_a_checkpoint() -> None:
    state = cursor().state()
    with refused("data", "", "weights"):
        cursor({**WEIGHTS, "a": 3.0}).restore(state)


def test_rows_are_held_out_of_each_training_set(jsonl: Callable[..., str], tokenizer: Any) -> None:
    easy = jsonl(*[{"question": f"{n}", "answer": "1"} for n in range(40)], name="easy.jsonl")
    hard = jsonl(*[{"question": f"{n}*", "answer": "1"} for n in range(20)], name="hard.jsonl")
    sets = {"easy": TrainSetConfig(path=easy), "hard": TrainSetConfig(path=hard, weight=3)}
    data = build(DataConfig(train_sets=sets, eval_fraction=0.1), tokenizer, seed=0, max_prompt_tokens=8)
    assert data.counts.text == "54 training rows (easy 36 at weight 1; hard 18 at weight 3), 6 held-out rows"
    assert Counter(prompt.source for prompt in data.train.take(400)) == {"easy": 100, "hard": 300}

    held_out = data.evals["eval"]
    assert Counter(prompt.source for prompt in held_out) == {"easy": 4, "hard": 2}
    assert len({prompt.id for prompt in held_out}) == 6
    assert held_out[0].id.startswith("eval/easy/")
    few = load(DataConfig(train_sets=sets, eval_fraction=0.1, eval_sets={"few": EvalSetConfig(rows=3)}))
    assert Counter(row.source for row in few.evals["few"]) == {"easy": 2, "hard": 1}
