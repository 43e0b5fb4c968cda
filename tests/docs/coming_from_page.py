"""The tables of `docs/coming_from.md`, generated from `app/config/foreign_names.yaml`.

python -m tests.docs.coming_from_page
"""

from pathlib import Path
from typing import Any

from app.config.foreign_names import table

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
BEGIN, END = "<!-- names: python -m tests.docs.coming_from_page -->", "<!-- end of names -->"


def render() -> str:
    """The page, with current tables between its two marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """A table for each program."""
    return "\n".join(
        f"\n## {program}\n\n| there | here | note |\n|---|---|---|\n" + "\n".join(map(_row, rows))
        for program, rows in table()["programs"].items()
    )


def _row(row: dict[str, Any]) -> str:
    theirs = ", ".join(f"`{name}`" for name in row["names"].split())
    if "because" in row:
        return f"| {theirs} | – | {row['because'].replace('<', '&lt;')} |"

    ours = ", ".join(f"`{word.removesuffix('=<value>').removesuffix('=[<value>]')}`" for word in row["write"].split())
    values = [f"`{there}`: `{here}`" for there, here in row.get("values", {}).items() if there != here]
    notes = "; ".join([row["note"], *values] if "note" in row else values)
    return f"| {theirs} | {ours} | {notes} |".replace("|  |", "| |")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
