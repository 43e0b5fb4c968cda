"""Bad input ends with one sentence that names the key, exit code 2, no traceback, and no output folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from app.config.arguments import check_arguments
from app.config.compose import config_error
from app.config.own_data import with_preset
from app.errors import ConfigError
from app.start.preflight import preflight
from app.start.settle import settle
from tests.folders import ROOT, composed_by_hydra, content
from tests.refusals import require
from tests.runs import Run
from tests.warm import run_warm

MY_TOOLS = "tests.environment.my_tools"
OWN = "tests.mode.own_environments"
DRAFTS = ["device=cuda", "rollout.speculative=mtp"]

REFUSED = [  # the key that is named, and the words of a command line
    ("model", ["model=foo"]),
    ("reward._target_", ["reward._target_=no_such.thing"]),
    ("reward._target_", ["reward._target_=math.no_such"]),
    ("steps", ["steps=abc"]),
    ("stepz", ["stepz=3"]),
    ("rollout.temprature", ["+rollout.temprature=1"]),
    ("reward.args.sandbox", ["reward=code", "+reward.args.sandbox=docker"]),
    ("reward.args.memory_mib", ["reward=code", "+reward.args.memory_mib=1"]),
    ("reward.args.memory", ["reward=code", "+reward.args.memory=1"]),
    ("data.context", ["data=mbpp", "data.context=''"]),
    ("reward.components.exactly", ["reward.components.exactly=0.1"]),
    ("data.eval_sets", ["data.eval_sets=x"]),
    ("data.eval_sets.aime", ["data.eval_sets.aime=x"]),
    ("data.eval_sets.aime.rows", ["+data.eval_sets.aime.rows=all"]),
    ("data.eval_sets.aime.path", ["+data.eval_sets.aime.path=/no/such.csv"]),
    ("data.eval_path", ["data.eval_path=/no/such.jsonl.gz"]),
    ("data.path", ["data.path=rows.jsonl", "+data.train_sets.mine.path=x"]),
    ("data.path", ["data.path=rows.jsonl", "data._target_=my.rows"]),
    ("data.train_sets.mine.path", ["+data.train_sets.mine.weight=2"]),
    ("weight_sync.mode", ["model=tiny_lora", "weight_sync.mode=delta"]),
    ("weight_sync.mode", ["weight_sync.mode=delta"]),
    ("weight_sync.mode", ["weight_sync.mode=delta", "device.dtype=bfloat16", "rollout.urls=[http://host:1]"]),
    ("weight_sync.mode", ["weight_sync.mode=delta", "device=cuda", "device.dtype=bfloat16"]),
    ("weight_sync.transport", ["model=tiny_lora", "weight_sync.transport=ipc"]),
    ("weight_sync.verify", ["model=tiny_lora", "weight_sync.verify=first"]),
    ("model.lora.targets", ["model.lora.targets=[]"]),
    ("model.lora.targets", ["model.lora.targets=[all,q_proj]"]),
    ("model.tiny.skill", ["model.tiny.skill=tools"]),
    ("data._target_", ["data._target_=rows"]),
    ("data._target_", ["data._target_=no_such.rows"]),
    ("data.args", ["data.args.limit=3"]),
    ("data.arithmetic.problems", ["data.arithmetic.problems=2500"]),
    ("data.products.problems", ["data=products", "data.products.problems=8000"]),
    ("data.path", ["data.name=mine"]),
    ("data.question", ["data.question=''"]),
    ("data.answer_after", ["data.answer_after=''"]),
    ("data.chat_template_kwargs", ["data.template=chat", "+data.chat_template_kwargs.enable_thinking=true"]),
    ("data.chat_template_kwargs", ["data.template=chat", "+data.chat_template_kwargs.messages=1"]),
    ("reward.components.format", ["+reward.components.format=abc"]),
    ("reward.components.style", ["+reward.components.style=0.2"]),
    ("reward.components.style", ["+reward.components.style=my.style"]),
    ("reward.components.style.limit", ["+reward.components.style._target_=my.f", "+reward.components.style.limit=9"]),
    ("reward.components.style._target_", ["+reward.components.style._target_=no_such.f"]),
    ("reward", ["reward=my.f"]),
    ("reward.components", ["~reward.components.exact"]),
    ("reward.components.exact", ["reward.components.exact=nan"]),
    ("reward._target_", ["reward._target_=reward"]),
    ("environment", ["environment=foo"]),
    ("environment._target_", ["environment._target_=Guess"]),
    ("environment._target_", ["environment=tools", "environment._target_=my.Env"]),
    ("environment.tools", ["environment=tools"]),
    ("environment.tools", ["environment.tools=[my_tools.search]"]),
    ("model.chat_template", ["model.chat_template=no.jinja"]),
    ("environment.id", ["environment=verifiers"]),
    ("environment.url", ["environment=openenv"]),
    ("environment.id", ["environment._target_=my.Env", "environment.id=x"]),
    ("environment.args", ["environment.args.size=3"]),
    ("tracking", ["tracking=mine"]),
    ("tracking.mine", ["+tracking.mine._target_=my.Tracker"]),
    ("train.steps", ["train.steps=3"]),
    ("environment.difficulty", ["+environment.difficulty=3"]),
    ("tracking.use", ["tracking.use=[no_such.Tracker]"]),
    ("tracking.use", ["tracking.use=[wandb,wandb]"]),
    ("tracking.args", ["+tracking.args.url=x"]),
    ("trainer", ["trainer=x"]),
    ("--steps=5", ["--steps=5"]),
    ("steps", ["steps=${oc.env:NOPE}"]),
    ("data.system", ["data.system=Hi,you"]),
    ("algorithm", ["algorithm=grpo,dapo"]),
    ("learning_rate", ["learning_rate=1e-5"]),
    ("algorithm", ["algorithm=ppo"]),
    ("actor_rollout_ref.rollout.name", ["actor_rollout_ref.rollout.name=vllm"]),
    ("data.eval_sets.aime.pth", ["data.eval_sets={aime: {pth: x}}"]),
    ("mode", ["mode=foo"]),
    ("placement", ["mode=sft", "placement=fully_async"]),
    ("algorithm.ce_coefficient", ["mode=sft", "algorithm.ce_coefficient=0.5"]),
    ("algorithm.kl", ["mode=sft", "algorithm.kl=k3", "algorithm.kl_coefficient=0.1"]),
    ("data.demonstrations", ["mode=sft", "data.demonstrations=rows.jsonl"]),
    ("environment", ["mode=sft", "environment=calculator"]),
    ("data.demonstrations", ["data.demonstrations=nowhere.jsonl"]),
    ("sft", ["sft=true"]),
    ("teacher.path", ["algorithm=opd", "teacher.path=./nowhere"]),
    ("rollout.temperature", ["algorithm=opd", "teacher.path=tiny", "rollout.temperature=0.7"]),
    ("teacher.engine_args.no-such", ["teacher.path=tiny", "+teacher.engine_args.no-such=1"]),
    (
        "teacher.engine_args.speculative-algorithm",
        ["teacher.path=tiny", "+teacher.engine_args.speculative-algorithm=EAGLE"],
    ),
    ("teacher.urls", ["teacher.path=tiny", "teacher.urls=[http://127.0.0.1:9]"]),
    ("teacher.urls", ["algorithm=opd", "teacher.urls=[127.0.0.1:9]"]),
    ("rollout.temperature", ["teacher.urls=[http://127.0.0.1:9]", "rollout.temperature=0.7"]),
    ("teacher.urls.arithmetic", ["teacher.urls={arithmetic: http://127.0.0.1:9}"]),
    ("teacher.urls.arithmetic", ["teacher.urls={arithmetic: []}"]),
    ("algorithm.group_size", ["algorithm.group_size=1"]),
    ("placement", ["placement=async"]),
    ("stop.at_accuracy", ["stop.at_accuracy=1.1"]),
    ("eval.every", ["stop.patience=3", "eval.every=0"]),
    ("rollout.top_p", ["rollout.top_p=0.9"]),
    ("rollout.top_k", ["rollout.top_k=20"]),
    ("eval.repetition_penalty", ["eval.repetition_penalty=1.1"]),
    ("rollout.val_kwargs.top_k", ["rollout.val_kwargs.top_k=20"]),
    ("eval.stop", ["eval.stop=['']"]),
    ("rollout.stop", ["rollout.stop=[a,'']"]),
    ("rollout.stop", ["rollout.stop=END"]),
    ("rollout.engine_args.not-a-flag", ["+rollout.engine_args.not-a-flag=1"]),
    ("rollout.engine_args.quantization", ["+rollout.engine_args.quantization=fp8"]),
    (
        "rollout.engine_args.enable-deterministic-inference",
        ["+rollout.engine_args.enable-deterministic-inference=true"],
    ),
    ("rollout.engine_args.max-running-requests", ["+rollout.engine_args.max-running-requests=false"]),
    ("rollout.engine_args.mem-fraction-static", ["+rollout.engine_args.mem-fraction-static=null"]),
    ("rollout.engine_args.quantizatio", ["+rollout.engine_args.quantizatio=fp8"]),  # an abbreviation
    ("rollout.engine_args.context-length", ["+rollout.engine_args.context-length=bogus"]),
    ("rollout.engine_args.context-len", ["+rollout.engine_args.context-len=bogus"]),
    ("rollout.engine_args.speculative-algorithm", ["mode=plan", "+rollout.engine_args.speculative-algorithm=NGRAM"]),
    ("rollout.speculative", ["rollout.speculative=mtp"]),
    ("rollout.speculative", [*DRAFTS, "model=qwen35_9b", "rollout.urls=[http://here]"]),
    ("rollout.speculative", [*DRAFTS, "model=qwen35_9b", "weight_sync.verify=first"]),
    ("rollout.speculative", [*DRAFTS, "model=qwen35_9b_lora"]),
    ("rollout.speculative", ["device=cuda", "model=qwen3_4b", "rollout.speculative=none/here"]),
    ("device.engine_args.rl-on-policy-target", ["mode=doctor", "+device.engine_args.rl-on-policy-target=fsdp"]),
    ("trainer.activation_checkpointing", ["trainer.activation_checkpointing=true"]),
    ("algorithm.kl", ["algorithm.kl=k1"]),
    ("algorithm.objective", ["algorithm.objective=ppo2"]),
    ("algorithm.advantage", ["algorithm.advantage=gae"]),
    ("algorithm.objective", ["algorithm.objective=dppo"]),
    ("algorithm.objective", ["algorithm=dppo", "algorithm.ratio=sequence"]),
    ("algorithm.overlong_buffer_fraction", ["algorithm.advantage=maxrl", "algorithm.overlong_buffer_fraction=0.2"]),
    ("algorithm.updates_per_step", ["algorithm.prompts_per_step=10", "algorithm.updates_per_step=4"]),
    ("algorithm.kl_coefficient", ["algorithm.kl_coefficient=0.04"]),
    ("algorithm.correction_low", ["algorithm.correction=icepop", "algorithm.correction_low=6"]),
    ("algorithm.correction", ["algorithm.old_policy=rollout", "algorithm.correction=tis"]),
    ("rollout.tensor_parallel", ["rollout.tensor_parallel=2"]),
    ("placement.in_flight", ["placement.max_staleness=1", "placement.in_flight=in_place"]),
    ("placement.max_staleness", ["mode=sft", "placement.max_staleness=1"]),
    ("placement.stream", ["placement=fully_async", "placement.stream=on", "algorithm.updates_per_step=2"]),
    ("model.path", ["model.path=/no/such/model"]),
    ("model.path", ["model.path=Qwen/Qwen3-4B"]),
    ("data.name", ["environment=verifiers", "environment.id=x", "data=gsm8k"]),
    ("data.eval_path", ["environment=verifiers", "environment.id=x", "data.eval_path=x"]),
    ("data.name", ["data=environment"]),
    ("rollout.max_completion_tokens", ["rollout.max_completion_tokens=3578"]),
    ("rollout.max_prompt_tokens", ["rollout.max_prompt_tokens=4089"]),
    ("weight_sync.transport", ["experiment=cuda4_colocate_4b", "weight_sync.transport=collective"]),
    ("tracking.project", ["tracking.project="]),
]

COMMANDS = [  # kinds of refusals, and what else the sentence names
    ("stepz=3", "did you mean steps"),  # by Hydra's composition
    ("steps=${oc.env:NOPE}", "NOPE"),
    ("--steps=5", "steps=5"),  # by the words alone
    ("algorithm.group_size=1", "algorithm.group_size=1"),  # by the settings
    ("data.path=no_rows_*.jsonl", "data.path=no_rows_*.jsonl"),  # by a check of the inputs
    ("mode=export", "hydra.run.dir"),
    ("mode=export resume=/no/such/run", "resume=/no/such/run"),
    ("reward._target_=tests.reward.broken.raises", "KeyError: 'score' at"),  # by processes that try the user's code
    ("environment._target_=no_such.Env", "no_such"),
    ("environment=openenv environment.url=ws://127.0.0.1:9", "environment.url=ws://127.0.0.1:9"),
    (f"environment=tools environment.tools=[{MY_TOOLS}.untyped]", f"{MY_TOOLS}.untyped"),
    (f"environment._target_={OWN}.Unscored reward=environment", "score"),
]


@pytest.mark.parametrize(("key", "words"), REFUSED, ids=[" ".join(words) for _, words in REFUSED])
def test_a_wrong_setting_is_refused_by_its_key(key: str, words: list[str], tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def start() -> None:
        overrides = with_preset(check_arguments(words))
        preflight(settle(composed_by_hydra(*overrides, f"hydra.run.dir={folder}"), folder).config, folder)

    with pytest.raises(Exception) as caught:  # noqa: PT011 (of Hydra, OmegaConf or ours)
        start()
    error = caught.value if isinstance(caught.value, ConfigError) else config_error(caught.value)
    require(error, key)
    assert content(tmp_path) == {}


@pytest.mark.parametrize(("line", "named"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_command_that_is_refused_writes_one_sentence_and_nothing_else(line: str, named: str, tmp_path: Path) -> None:
    """In a fork of a process that has imported the application."""
    named_folder = line != "mode=export"
    given = [f"hydra.run.dir={tmp_path / 'run'}"] if named_folder else []
    result = run_warm(*line.split(), *given, cwd=ROOT if named_folder else tmp_path)
    assert result.returncode == 2, result.stderr
    assert_one_sentence(result.stderr, named)
    assert content(tmp_path) == {}
    assert not {"torch", "sglang"} & set(result.heavy)


@pytest.mark.parametrize("line", ["steps=abc", f"environment._target_={OWN}.Unscored reward=environment"])
def test_a_new_process_refuses_the_same_and_leaves_no_process(line: str, start: Callable[..., Run]) -> None:
    """Environments are refused by a worker process."""
    result = start(*line.split())
    assert result.wait(120) == 2, result.text
    assert_one_sentence(result.text, line.partition("=")[0])
    assert not result.folder.exists()
    assert result.gone_within(10), result.processes()


def assert_one_sentence(text: str, named: str) -> None:
    (line,) = [line for line in text.splitlines() if line.strip()]
    assert line.endswith((".", "?"))
    assert named in line
