"""The environments that the page shows, written to modules and played in real workers."""

import asyncio
from pathlib import Path

from app.environment.tools import load_tools
from tests.environment.pools import Maker, Played, a_task, play_one, running_pool


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
