"""The code that the pages show: rows, rewards and environments, written to modules and used as in a run."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.data import rows
from app.environment.tools import load_tools
from tests.compose import composed
from tests.docs.markdown import PAGES, code_blocks
from tests.environment.pools import Maker, Played, a_task, play_one, running_pool
from tests.reward.scorers import failed, running_scorer, score, trajectory
from tests.tiny_models.tokenizer import build_tokenizer


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who copied every Python block of the pages into the file that it names."""
    for language, text in (block for page in PAGES for block in code_blocks(page)):
        title = text.partition("\n")[0].removeprefix("# ")
        if language == "python" and title.endswith(".py"):
            with (tmp_path / title).open("a") as file:
                file.write(text)
            monkeypatch.delitem(sys.modules, title.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_rows_with_messages_of_the_page_are_read(tmp_path: Path) -> None:
    (text,) = [text for page in PAGES for language, text in code_blocks(page) if language == "json"]
    file = tmp_path / "chat.jsonl"
    file.write_text(text)
    config = composed("data=rows", f"data.path={file}", f"data.eval_path={file}", "data.question=prompt").data
    found = [(row.question, row.answer, [each["role"] for each in row.messages]) for row in rows.load(config).train]
    assert found == [("12+34=", "46", ["system", "user"]), ("And 1?", "3", ["user", "assistant", "user"])]


def test_the_rewards_of_the_page_score(reader: Path) -> None:
    batch = [trajectory(text, "46") for text in (" 46", "47")]  # of eight tokens
    with running_scorer(_target_="my_rewards.brief_and_right", args={"per_token": 0.01}) as scorer:
        assert score(scorer, batch) == pytest.approx([0.92, -0.08])
    with running_scorer(_target_="my_rewards.keywords") as scorer:
        assert score(scorer, [trajectory("red and blue", keywords=["red", "green"])]) == [0.5]


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible judge that grades 8 and fails on an empty completion; a classifier that counts tokens."""

    groups: list[list[list[int]]]  # that were classified

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/classify":
            self.groups.append(body["input_ids"])
            reply: object = [{"embedding": [float(len(tokens))]} for tokens in body["input_ids"]]
        else:
            reply = {"choices": [{"message": {"content": "8"}}]}
        fails = "messages" in body and body["messages"][0]["content"].endswith("\n")

        self.send_response(500 if fails else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def server_url() -> Iterator[str]:
    Server.groups = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_judge_of_the_page_asks_a_server(reader: Path, server_url: str) -> None:
    args = {"url": f"{server_url}/v1/chat/completions", "model": "judge"}
    with running_scorer(_target_="my_judge.Judge", args=args) as scorer:
        assert score(scorer, [trajectory(text) for text in ("46", "", "47")]) == [0.8, 0, 0.8]
        assert failed(scorer) == {"exception": 1}


def test_a_group_is_one_request_to_the_reward_model(reader: Path, server_url: str) -> None:
    tokenizer = build_tokenizer(512)
    tokenizer.save_pretrained(reader / "classifier")
    batch = [trajectory("46"), trajectory("")]
    asked = {"role": "user", "content": "what is it?"}
    conversations = [[asked, {"role": "assistant", "content": each.text}] for each in batch]
    tokens = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]

    args = {"url": f"{server_url}/classify", "tokenizer": str(reader / "classifier")}
    with running_scorer(_target_="my_reward_model.RewardModel", args=args) as scorer:
        assert score(scorer, batch) == [len(each) for each in tokens]
    assert Server.groups == [tokens]


# --- environments, in real workers


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
