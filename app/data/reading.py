"""From the raw records of one set to its rows: fields are mapped, broken rows skipped, repetitions dropped.

Invariants:
- A row keeps its index among all records of its set, whatever is skipped or dropped before it.
"""

from collections.abc import Iterable, Iterator

from app.data.fields import FieldMap, Row
from app.data.records.formats import Records
from app.errors import ConfigError

Setting = tuple[str, str]  # its key and value

MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))  # columns of other trainers


class BrokenRows:
    """Counts the broken rows that a run skips, and the columns that it cannot use, over all of its sets.

    Args:
        limit: `data.max_broken_rows`; the next broken row is an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._skipped: dict[str, list[ConfigError]] = {}  # by file or data set
        self._unused: dict[str, set[str]] = {}  # columns, by file or data set

    @property
    def count(self) -> int:
        return sum(map(len, self._skipped.values()))

    @property
    def warnings(self) -> list[str]:
        """One sentence for each file that had broken rows, or columns that no prompt can have."""
        skipped = [
            f"skipped {len(errors)} broken row(s) of {where}; the first: {errors[0]}"
            for where, errors in self._skipped.items()
        ]
        unused = [
            f"columns of {where} are not used, since prompts are text: {', '.join(sorted(names))}"
            for where, names in self._unused.items()
        ]
        return [*skipped, *unused]

    def leave_out(self, where: str, columns: Iterable[str]) -> None:
        """Count columns of a file as unused."""
        self._unused.setdefault(where, set()).update(columns)

    def skip(self, where: str, error: ConfigError) -> None:
        """Count a broken row of a file. Raises its error if too many were skipped before."""
        if self.count < self._limit:
            self._skipped.setdefault(where, []).append(error)
            return
        if not self._limit:
            raise error
        skipped = f"data.max_broken_rows={self._limit} broken rows were skipped before"
        raise ConfigError(error.key, error.value, error.accepted, skipped) from error


def read_rows(
    records: Records, fields: FieldMap, source: str, setting: Setting, distinct: bool, broken: BrokenRows
) -> list[Row]:
    """Read the rows of one set.

    Args:
        setting: Key and value named in errors about all rows: "data.path", "rows.jsonl".
        distinct: Keep only the first of rows with the same question and answer.
        broken: Counts the rows that are skipped.

    Raises:
        ConfigError: A row is broken and none may be skipped any more, or there are no rows.
    """
    skipped_before = broken.count
    mapped = _mapped(records, fields, source, broken)
    rows = list(_distinct(mapped) if distinct else mapped)
    if not rows:
        skipped = broken.count - skipped_before
        why = f"all {skipped} rows of this one are broken" if skipped else "this one is empty"
        raise ConfigError(*setting, "a data set with rows", why)
    return rows


def _mapped(records: Records, fields: FieldMap, source: str, broken: BrokenRows) -> Iterator[Row]:
    for index, record in enumerate(records):
        try:
            if isinstance(record.values, ConfigError):
                raise record.values
            place = f"row {record.number} of {record.where}"
            row = fields.row(record.values, source=source, index=index, place=place, padded=record.padded)
            if unused := MEDIA.intersection(record.values) | {*record.left_out}:
                broken.leave_out(record.where, unused)
        except ConfigError as error:
            broken.skip(record.where, error)
        else:
            yield row


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.asked, row.answer) not in seen:
            seen.add((row.asked, row.answer))
            yield row
