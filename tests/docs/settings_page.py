"""`docs/settings.md`, generated from what the settings declare: `python -m tests.docs.settings_page`."""

import inspect
from pathlib import Path

from app.config import RunConfig
from app.config.setting import Setting, settings
from app.errors import yaml_text

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """\
# Settings

Every setting with the default of `app/config/`, the accepted values and the meaning. Presets change many defaults;
this shows the values in force:

    python -m app model=qwen3_4b device=cuda --cfg job

`python -m app --help` prints this table for a composition. This page is generated:
`python -m tests.docs.settings_page`.
"""


def render() -> str:
    """The page: a table for each section, in the order of the sections."""
    sections: dict[str, list[Setting]] = {}
    for each in settings(RunConfig):
        sections.setdefault(each.key.rpartition(".")[0], []).append(each)

    tables = [_table(name, members) for name, members in sections.items()]
    return "\n".join([HEAD, *tables])


def _table(name: str, members: list[Setting]) -> str:
    summary = (inspect.getdoc(members[0].section) or "").partition("\n")[0]
    rows = []
    for each in members:
        default = yaml_text(each.default) or "''"
        rows.append(f"| `{each.key}` | `{default}` | {_cell(each.accepted)} | {_cell(each.help)} |")
    heading = _cell(name) or "The run"
    lines = [f"## {heading}", "", summary, "", "| setting | default | accepted | meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text in a Markdown table, where `|` would end the cell and `<name>` would be HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
