"""Settings of TRL, verl, prime-rl, slime, the Hugging Face trainer and earlier versions, and their counterparts here.

The error for an unknown setting names its counterpart. The tables of `docs/coming_from.md` come from the same file,
`foreign_names.yaml`.
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
    >>> answer("use_kl_loss", "False"), answer("use_tis"), answer("report_to", "[wandb,tensorboard]")
    ('write algorithm.kl=none', 'write algorithm.correction=tis', 'write tracking.use=[wandb,tensorboard]')
    """
    words = key.replace("-", "_").split(".")
    for start in range(len(words)):
        parents = [f"{'.'.join(words[start:end])}.*" for end in range(start + 1, len(words))]
        for name in (".".join(words[start:]), *parents):
            if (entry := entries().get(name)) is None:
                continue
            if "because" in entry:
                return str(entry["because"])
            values = entry.get("values", {})
            switch = "true" if value == VALUE and "false" in values else value.lower()  # `--use-tis`, without a value
            written = values.get(switch, VALUE) if values else value
            if "[<" in entry["write"] and value != VALUE:
                written = ",".join(each for each in re.findall(r"[\w.]+", written) if each not in ("none", "console"))
            # a value may stand in an expression that the reader computes: <value/algorithm.group_size>
            text = re.sub(r"\bvalue\b", written.strip("<>").replace("\\", r"\\"), entry["write"])
            return f"write {text.replace(f'<{written}>', written)}"
    return None
