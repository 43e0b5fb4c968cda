"""The environments that the page shows, written to modules and played in real workers."""

import asyncio
import sys
from pathlib import Path

import pytest

from app.environment.tools import load_tools
from tests.docs.markdown import ROOT, code_blocks
from tests.environment.pools import Maker, Played, a_task, play_one, running_pool

PAGE = ROOT / "docs" / "environments.md"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who copied every block of the page into the file that it names."""
    names = []
    for language, text in code_blocks(PAGE):
        title = text.partition("\n")[0].removeprefix("# ")
        if language == "python":
            (tmp_path / title).write_text(text)
            names.append(title.removesuffix(".py"))
    assert sorted(names) == ["my_agents", "my_envs", "my_openai_agents", "my_tools"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def played(reader: Path, module: str, name: str, *replies: str) -> Played:
    async def story() -> Played:
        spec = Maker(reader)(f"from {module} import {name} as Env")
        async with running_pool(spec) as pool:
            return await play_one(pool, *replies, task=a_task(question="12+34=", answer="46"))

    return asyncio.run(story())


def test_the_game_of_the_page_answers_whatever_the_policy_says(reader: Path) -> None:
    episode = played(reader, "my_envs", "Guess", "well", "99", "40", "46")
    observations = [text for _, text in episode.texts][1:]
    assert observations == ["|a number, please\n>", "|lower\n>", "|higher\n>"]
    assert (episode.scored.scores, episode.scored.ending) == ({"score": 1.0}, "stop")


def test_the_game_of_the_page_scores_0_when_the_policy_has_no_room_left(reader: Path) -> None:
    episode = played(reader, "my_envs", "Guess", "99")
    assert (episode.scored.scores, episode.scored.ending) == ({"score": 0.0}, "length")


def test_the_agent_of_the_page_reviews_its_draft_in_a_sequence_of_its_own(reader: Path) -> None:
    episode = played(reader, "my_agents", "Solver", "45", "46")
    assert episode.texts == [(0, "12+34=>"), (1, "Check: 45>")]
    assert episode.scored.scores == {"score": 1.0}


def test_the_openai_agent_of_the_page_is_played(reader: Path) -> None:
    episode = played(reader, "my_openai_agents", "Agent", " 46")
    assert episode.texts == [(0, "12+34=>")]
    assert episode.scored.scores == {"score": 1.0}


def test_the_tools_of_the_page_have_schemas(reader: Path) -> None:
    (reader / "handbook.txt").write_text("Sync after each step.\nsync twice\nnothing\n")
    tools = load_tools(["my_tools.search", "my_tools.Notebook"])
    assert sorted(tools) == ["note", "search"]
    parameters = tools["search"].schema["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"]["results"]["type"] == "integer"
    assert tools["search"].function("sync", 1) == "Sync after each step."
