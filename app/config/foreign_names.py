"""Settings of TRL, verl, prime-rl, slime, the Hugging Face trainer and earlier versions: what to write, or why nothing.

They answer an unknown setting. `foreign_names.yaml` has them, for the tables of `docs/coming_from.md` too.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

VALUE = "<value>"


@cache
def table() -> Any:
    """Return the content of `foreign_names.yaml`."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@cache
def entries() -> dict[str, dict[str, Any]]:
    """Return the entry of each name, written with underscores."""
    rows = [row for rows in table()["programs"].values() for row in rows]
    return {name.replace("-", "_"): row for row in rows for name in row["names"].split()}


def choice(text: str) -> str:
    """Return what to write instead of another program's choice (`algorithm=ppo`); empty for an unknown one."""
    return str(table()["choices"].get(text, ""))


def answer(key: str, value: str = VALUE) -> str | None:
    """Return what to write instead of a setting of another program, or why there is none; None for an unknown name.

    >>> answer("actor_rollout_ref.rollout.n", "8"), answer("trainer.total_epochs", "15"), answer("seed")
    ('write algorithm.group_size=8', 'write epochs=15', None)
    >>> answer("loss_agg_mode", "token-mean"), answer("generation_batch_size", "64")
    ('write algorithm.aggregation=token_mean', 'write algorithm.prompts_per_step=<64/algorithm.group_size>')
    """
    words = key.replace("-", "_").split(".")
    candidates = (
        name
        for start in range(len(words))
        for name in (
            ".".join(words[start:]),
            *(f"{'.'.join(words[start:end])}.*" for end in range(start + 1, len(words))),
        )
    )
    found = next((entries()[name] for name in candidates if name in entries()), None)
    if found is None:
        return None
    if "because" in found:
        return str(found["because"])
    if "values" in found:
        value = found["values"].get(value.lower(), VALUE)

    def filled(match: re.Match[str]) -> str:
        """Return the value, or the value in an expression that the reader computes: <8/algorithm.group_size>."""
        inner = match[1].replace(VALUE[1:-1], value) if value != VALUE else match[1]
        return value if match[0] == VALUE else f"<{inner}>"

    return f"write {re.sub('<([^<>]*)>', filled, found['write'])}"
