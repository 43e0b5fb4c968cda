"""The kinds of environments, in worker processes with the real renderers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.environment.pool import EnvironmentSpec
from app.environment.rendering.tokenizer_file import TokenizerFile
from app.environment.wire import End, Limits, RendererChoice, SampleRequest
from tests.environment.pools import PATIENCE_S, a_task, running_pool
from tests.environment.qwen import write_model

LIMITS = Limits(max_turns=8, max_turn_tokens=None, max_observation_tokens=100, timeout_s=30.0, episode_s=100.0)


def play_texts(kind: dict, name: str, model: Path, prompt: str, *replies: str) -> tuple[End, list[tuple[int, str]]]:
    """Play one episode; returns its end, and sequence and text of what was appended for each request."""
    tokenizer = TokenizerFile(model)
    encode, decode = tokenizer.encode, tokenizer.decode
    spec = EnvironmentSpec(
        {"args": {}, **kind}, RendererChoice("plain" if name == "plain" else "chat", str(model), "template"), LIMITS
    )

    async def run() -> tuple[Any, list[Any]]:
        said = iter(replies)
        asked = []
        async with running_pool(spec) as pool:
            session = await pool.begin(a_task(question=prompt), encode(prompt))
            while isinstance(event := await asyncio.wait_for(session.next(), PATIENCE_S), SampleRequest):
                asked.append((event.sequence, decode(event.append)))
                session.answer(event, encode(next(said)), "stop")
            return event, asked

    return asyncio.run(run())


def test_a_calculator_answers_the_tiny_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    end, asked = play_texts({"kind": "calculator"}, "plain", model, "37*84=", "?37*84<|im_end|>", "3108<|im_end|>")
    assert asked == [(0, "37*84="), (0, "3108\n")]
    assert end.scores == {}
    assert end.text == "3108"
    assert end.metrics["tool_calls"] == 1.0


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_tools_answer_a_model_with_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("renderers")
    (tmp_path / "tools_of_a_test.py").write_text(
        "def add(a: int, b: int) -> int:\n"
        '    """Add two numbers.\n\n    Args:\n        a: One.\n        b: Another.\n    """\n'
        "    return a + b\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = write_model(tmp_path / "model", name)
    call = {
        "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call><|im_end|>',
        "qwen3.5": "</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call><|im_end|>",
    }[name]
    kind = {"kind": "tools", "tools": ["tools_of_a_test.add"]}
    end, asked = play_texts(kind, name, model, "1+2?", call, "It is 3.<|im_end|>")
    assert [sequence for sequence, _ in asked] == [0, 0]
    assert '"name": "add"' in asked[0][1]
    assert "<tool_response>\n3\n</tool_response>" in asked[1][1]
    assert (end.ending, end.scores) == ("stop", {})
    assert (end.metrics["tool_calls"], end.metrics["tool_failures"]) == (1.0, 0.0)
    assert [turn["role"] for turn in end.turns] == ["user", "assistant", "tool", "assistant"]


def test_an_environment_with_an_openai_client_asks_at_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent_of_a_test.py").write_text(
        """
import json, urllib.request
class Agent:
    def begin(self, task): return None
    def step(self, reply): ...
class Client:
    async def run(self, task, policy):
        import asyncio
        self.url = policy.url
        first = await asyncio.to_thread(self.chat, [{"role": "user", "content": task.question}])
        second = await asyncio.to_thread(
            self.chat, [{"role": "user", "content": task.question}, first, {"role": "user", "content": "sure?"}])
        return float(second["content"] == "yes")
    def chat(self, messages):
        data = json.dumps({"model": "policy", "messages": messages}).encode()
        request = urllib.request.Request(self.url + "/chat/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = write_model(tmp_path / "model", "qwen3")
    kind = {"kind": "own", "target": "agent_of_a_test.Client"}
    end, asked = play_texts(kind, "plain", model, "6*7=", "42<|im_end|>", "yes<|im_end|>")
    assert asked == [(0, "6*7="), (0, "sure?")]
    assert end.scores == {"score": 1.0}
