"""Reads `.wandb` files, which hold what W&B's helper process wrote, record by record."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file: LevelDB's log format (32 KiB blocks; checksum, length and type)."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    offset = HEADER
    content = b""
    while offset + HEADER <= len(data):
        if BLOCK - offset % BLOCK < HEADER:
            offset += BLOCK - offset % BLOCK
            continue

        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        content += data[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            record = vars(wandb_internal_pb2)["Record"]()
            record.ParseFromString(content)
            content = b""
            yield record


class Recorded:
    """What one `.wandb` file holds. A nested value of the history has a name with dots, like `samples/eval.nrows`."""

    def __init__(self, path: Path) -> None:
        self.run_id = path.stem.removeprefix("run-")
        self.history: dict[int, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.exit_codes: list[int] = []
        for entry in wandb_records(path):
            kind = entry.WhichOneof("record_type")
            if kind == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in entry.history.item
                }
                assert values["_step"] not in self.history, "a step was sent twice"
                self.history[values["_step"]] = values
            elif kind == "run":
                self.config.update({item.key: json.loads(item.value_json) for item in entry.run.config.update})
            elif kind == "exit":
                self.exit_codes.append(entry.exit.exit_code)

    def column(self, name: str) -> dict[int, float]:
        return {step: round(values[name], 6) for step, values in self.history.items() if name in values}


def recorded(folder: Path) -> list[Recorded]:
    """The attempts of a run, oldest first."""
    files = (folder / "tracking/wandb").glob("offline-run-*/*.wandb")
    return [Recorded(path) for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]
