"""The rewards, rows and the tracker that the pages show, written to modules and used as in a run."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from app.config.tracking import TrackingConfig
from app.data import rows
from app.device.torchvision_shim import transformers
from app.rollout.engine.host import EngineHost
from app.tracking.dashboards import require_trackers
from tests.compose import composed
from tests.docs.markdown import PAGES, ROOT, code_blocks
from tests.reward.scorers import failed, running_scorer, score, trajectory
from tests.rollout.support import KEY, host_spec, server_spec
from tests.tiny_models.tokenizer import build_tokenizer
from tests.tracking.records import offline, record, warnings

REWARDS = ROOT / "docs" / "rewards.md"


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


def test_the_weighted_sum_of_the_page_is_that_of_its_command(reader: Path) -> None:
    page = REWARDS.read_text().splitlines()
    (line,) = [each.strip() for each in page if "+reward.components.brief._target_" in each]
    config = composed(*line.removeprefix("python -m app ").split()).reward
    with running_scorer(components=config.components) as scorer:
        assert score(scorer, [trajectory("\\boxed{46}", "46")]) == pytest.approx([1.0 + 0.2 * -0.08])


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


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of random weights, with the tokenizer and the chat template of the tiny model."""
    package = transformers()
    torch.manual_seed(0)
    tokenizer = build_tokenizer(512)
    config = package.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("classifier")
    package.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def classify_url(classifier: Path, tmp_path: Path) -> Iterator[str]:
    """SGLang's server of the classifier; its key is KEY."""
    host = EngineHost(
        host_spec(
            tmp_path, name="classifier", server=server_spec(classifier, tmp_path, name="classifier", is_embedding=True)
        )
    )
    with asyncio.Runner() as runner:
        url = runner.run(host.start())["url"]
        yield f"{url}/classify"
        runner.run(host.stop())


def logits(classifier: Path, texts: list[str]) -> list[float]:
    """Those of transformers, one conversation at a time."""
    package = transformers()
    model = package.AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    tokenizer = package.AutoTokenizer.from_pretrained(classifier)
    with torch.no_grad():
        return [
            model(
                **tokenizer.apply_chat_template(conversation(text), return_dict=True, return_tensors="pt")
            ).logits.item()
            for text in texts
        ]


@pytest.mark.slow
def test_the_reward_model_of_the_page_scores_as_transformers(reader: Path, classifier: Path, classify_url: str) -> None:
    args = {"url": classify_url, "tokenizer": str(classifier), "key": KEY}
    texts = ["46", "", "12+34 is 46, which I know."]
    expected = logits(classifier, texts)
    assert np.ptp(expected) > 0.1
    with running_scorer(_target_="my_reward_model.RewardModel", args=args) as scorer:
        assert score(scorer, [trajectory(text) for text in texts]) == pytest.approx(expected, abs=1e-4)
        assert failed(scorer) == {}


def test_the_tracker_of_the_page_records_a_run(reader: Path) -> None:
    config = offline("my_tracker.JsonLines")
    config.tracking.args = {"name": "mine"}
    require_trackers(TrackingConfig(use=config.tracking.use, args=config.tracking.args))
    record(config, reader / "run", (1, 2))
    lines = (reader / "run/tracking/my_tracker.JsonLines/mine.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, 0, 1, 2, None]
    assert json.loads(lines[-1]) == {"status": "finished"}
    assert warnings(reader / "run") == []
