"""The rewards, rows and the tracker that the pages show, written to modules and used as in a run."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from app.data import rows
from tests.compose import composed
from tests.docs.markdown import PAGES, code_blocks
from tests.reward.scorers import failed, running_scorer, score, trajectory
from tests.tiny_models.tokenizer import build_tokenizer


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
    tokens = [tokenizer.apply_chat_template(conversation(each.text), return_dict=False) for each in batch]

    args = {"url": f"{server_url}/classify", "tokenizer": str(reader / "classifier")}
    with running_scorer(_target_="my_reward_model.RewardModel", args=args) as scorer:
        assert score(scorer, batch) == [len(each) for each in tokens]
    assert Server.groups == [tokens]


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": text}]
