"""The rewards and the tracker that the pages show, written to modules and used as in a run."""

import asyncio
import importlib
import json
import sys
import threading
import time
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
from app.types import Completion, FinishReason, Prompt, Trajectory, VersionSpan
from tests.compose import composed
from tests.docs.markdown import ROOT, code_blocks
from tests.reward.scorers import failed, running_scorer, score
from tests.rollout.support import KEY, host_spec, server_spec
from tests.tiny_models.tokenizer import build_tokenizer
from tests.tracking.records import offline, record, warnings

MODULES = ("my_rewards", "my_judge", "my_reward_model", "my_tracker")
EXTENDING = ROOT / "docs" / "extending.md"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who copied every block of the page into the file that it names."""
    for language, text in code_blocks(EXTENDING):
        title = text.partition("\n")[0].removeprefix("# ")
        if language == "python" and title.removesuffix(".py") in MODULES:
            with (tmp_path / title).open("a") as file:
                file.write(text)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def trajectory(text: str, answer: str = "46", **row: object) -> Trajectory:
    prompt = Prompt("rows/0@0", np.zeros(2, np.int32), answer, "rows", question="12+34=", row=row)
    completion = Completion(
        np.zeros(3, np.int32), np.zeros(3, np.float32), FinishReason.stop, (VersionSpan(0, 0, 3),), text
    )
    return Trajectory(prompt, completion, text)


def test_the_rows_with_messages_of_the_page_are_read(tmp_path: Path) -> None:
    (text,) = [text for language, text in code_blocks(EXTENDING) if language == "json"]
    file = tmp_path / "chat.jsonl"
    file.write_text(text)
    config = composed("data=rows", f"data.path={file}", f"data.eval_path={file}", "data.question=prompt").data
    found = [(row.question, row.answer, [each["role"] for each in row.messages]) for row in rows.load(config).train]
    assert found == [("12+34=", "46", ["system", "user"]), ("And 1?", "3", ["user", "assistant", "user"])]


def test_the_rewards_of_the_page_score(modules: Path) -> None:
    batch = [trajectory(" 46"), trajectory("47")]
    with running_scorer(_target_="my_rewards.brief_and_right", args={"per_token": 0.01}) as scorer:
        assert score(scorer, batch) == pytest.approx([0.97, -0.03])
    with running_scorer(_target_="my_rewards.Regex", args={"pattern": r"^\s*{answer}\s*$"}) as scorer:
        assert score(scorer, batch) == [1, 0]
    with running_scorer(_target_="my_rewards.keywords") as scorer:
        assert score(scorer, [trajectory("red and blue", keywords=["red", "green"])]) == [0.5]


def test_the_weighted_sum_of_the_page_is_that_of_its_command(modules: Path) -> None:
    page = EXTENDING.read_text().splitlines()
    (line,) = [each.strip() for each in page if "+reward.components.brief._target_" in each]
    config = composed(*line.removeprefix("python -m app ").split()).reward
    with running_scorer(components=config.components) as scorer:
        assert score(scorer, [trajectory("\\boxed{46}")]) == pytest.approx([1.0 + 0.2 * -0.03])


class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that grades 8, and fails on an empty completion."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        self.send_response(500 if asked.endswith("\n") else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": "8"}}]}).encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()


def test_the_judge_of_the_page_asks_a_server(modules: Path, judge_url: str) -> None:
    with running_scorer(_target_="my_judge.Judge", args={"url": judge_url, "model": "judge"}) as scorer:
        assert score(scorer, [trajectory(text) for text in ("46", "", "47")]) == [0.8, 0, 0.8]
        assert failed(scorer) == {"exception": 1}


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


class Classifier(BaseHTTPRequestHandler):
    """A stand-in for SGLang's `/classify`: the score is the number of tokens; `/hang` never replies."""

    groups: list[list[list[int]]]

    def do_POST(self) -> None:
        group = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
        self.groups.append(group)
        if self.path == "/hang":
            time.sleep(2)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps([{"embedding": [float(len(tokens))]} for tokens in group]).encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def test_a_group_is_one_request_to_the_reward_model_with_a_deadline(modules: Path) -> None:
    tokenizer = build_tokenizer(512)
    tokenizer.save_pretrained(modules / "classifier")
    batch = [trajectory("46"), trajectory("")]
    conversations = [
        [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": each.text}] for each in batch
    ]
    tokens = [tokenizer.apply_chat_template(turns, return_dict=False) for turns in conversations]
    Classifier.groups = []
    reward = importlib.import_module("my_reward_model").RewardModel

    async def scores(path: str, timeout_s: float) -> list[float]:
        model = reward(f"http://127.0.0.1:{server.server_port}{path}", str(modules / "classifier"), timeout_s)
        try:
            return await model(batch)
        finally:
            await model.session.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Classifier) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert asyncio.run(scores("/classify", 60)) == [len(each) for each in tokens]
        assert Classifier.groups == [tokens]
        with pytest.raises(TimeoutError):
            asyncio.run(scores("/hang", 0.1))
        server.shutdown()


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


def logits(classifier: Path, conversations: list[list[dict[str, str]]]) -> list[float]:
    """Those of transformers, one conversation at a time."""
    package = transformers()
    model = package.AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    tokenizer = package.AutoTokenizer.from_pretrained(classifier)
    inputs = [tokenizer.apply_chat_template(turns, return_dict=True, return_tensors="pt") for turns in conversations]
    with torch.no_grad():
        return [model(**each).logits.item() for each in inputs]


@pytest.mark.slow
def test_the_reward_model_of_the_page_scores_as_transformers(
    modules: Path, classifier: Path, classify_url: str
) -> None:
    args = {"url": classify_url, "tokenizer": str(classifier), "key": KEY}
    texts = ["46", "", "12+34 is 46, which I know."]
    expected = logits(
        classifier,
        [[{"role": "user", "content": "12+34="}, {"role": "assistant", "content": text}] for text in texts],
    )
    assert np.ptp(expected) > 0.1
    with running_scorer(_target_="my_reward_model.RewardModel", args=args) as scorer:
        assert score(scorer, [trajectory(text) for text in texts]) == pytest.approx(expected, abs=1e-4)
        assert failed(scorer) == {}


def test_the_tracker_of_the_page_records_a_run(modules: Path) -> None:
    config = offline("my_tracker.JsonLines")
    config.tracking.args = {"name": "mine"}
    require_trackers(TrackingConfig(use=config.tracking.use, args=config.tracking.args))
    record(config, modules / "run", (1, 2))
    lines = (modules / "run/tracking/my_tracker.JsonLines/mine.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, 0, 1, 2, None]
    assert json.loads(lines[-1]) == {"status": "finished"}
    assert warnings(modules / "run") == []
