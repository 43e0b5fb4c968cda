"""What the tests read out of the pages: commands, code, links, headings, tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LAUNCHERS = ("launch/quickstart.sh", "launch/run.sh", "launch/docker.sh", "launch/slurm.sbatch", "launch/kubernetes.sh")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page. `output` is the next line where the page shows one, behind a `$` prompt."""

    page: str
    line: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of fenced blocks."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], match[2]


def inline_code(page: Path) -> list[str]:
    """The content of single backticks outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("    "))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def commands(page: Path) -> Iterator[Command]:
    """Lines of blocks, and inline code, that run something of this repository."""
    lines = page.read_text().splitlines()
    fenced = False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and not line.startswith("    "):
            continue

        prompt = line.strip().startswith("$ ")
        text = line.strip().removeprefix("$ ")
        if _runs_something(text):
            yield Command(name(page), text, lines[number + 1].strip() if prompt else None)

    for code in inline_code(page):
        if _runs_something(code):
            yield Command(name(page), code)


def _runs_something(text: str) -> bool:
    return re.match(r"(\w+=\S* )?(python -m (app|tests)|bash launch/|sbatch )", text) is not None


def links(page: Path) -> list[str]:
    """Targets of links and images that lie in this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The ids that MkDocs and GitHub give to headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings]
    return {re.sub(r"\s+", "-", heading) for heading in plain}


def table_names(page: Path, heading: str) -> set[str]:
    """The names in backticks in the first column of all tables below a heading of level 2."""
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    first_columns = re.findall(r"^\| ([^|]+) \|", section, re.M)
    return {found for column in first_columns for found in re.findall(r"`([^`]+)`", column)}
