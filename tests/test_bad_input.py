"""Bad input ends with one sentence that names the key, exit code 2, no traceback, and no output folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import Run
from tests.warm import Ended, run_warm

MY_TOOLS = "tests.environment.my_tools"
OWN = "tests.mode.own_environments"

REFUSED = [  # overrides, and what the sentence names: the setting, and what is accepted
    (["model=foo"], ["model=foo", "tiny", "qwen35_9b"]),
    (["reward._target_=no_such.thing"], ["reward._target_=no_such.thing", "no module no_such"]),
    (["reward._target_=math.no_such"], ["reward._target_=math.no_such", "module math has no no_such"]),
    (["steps=abc"], ["steps=abc", "a whole number of at least 1"]),
    (["stepz=3"], ["stepz", "did you mean steps"]),
    (["+rollout.temprature=1"], ["rollout.temprature", "rollout.temperature"]),
    (["reward=code", "+reward.args.memory_mib=1"], ["reward.args.memory_mib=1", "at least 64"]),
    (["reward=code", "+reward.args.memory=1"], ["reward.args.memory=1", "partial, memory_mib"]),
    (["reward=code"], ["reward=code", "test_list", "answer, question"]),
    (["data=mbpp", "data.context=''"], ["data.context=''", "null or the name of a field"]),
    (["reward.components.exactly=0.1"], ["reward.components.exactly=0.1", "weights of exact, format, math"]),
    (["data.eval_sets=x"], ["data.eval_sets=x", "+data.eval_sets.mine.path=FILE"]),
    (["data.eval_sets.aime=x"], ["data.eval_sets.aime=x ", "data.eval_sets.aime.path=x."]),
    (
        ["data.eval_sets={aime: [a, b]}"],
        ["data.eval_sets.aime=[a, b] ", "data.eval_sets.aime.path="],
    ),
    (["+data.eval_sets.aime.rows=all"], ["data.eval_sets.aime.rows=all", "null or a whole number of at least 1"]),
    (["+data.eval_sets.aime.path=/no/such.csv"], ["data.eval_sets.aime.path=/no/such.csv", "there is no such file"]),
    (["data.eval_path=/no/such.jsonl.gz"], ["data.eval_path=/no/such.jsonl.gz", "there is no such file"]),
    (
        ["data.path=rows.jsonl", "+data.train_sets.mine.path=x"],
        ["data.path=rows.jsonl", "null beside data.train_sets", "+data.train_sets.<name>.path=FILE"],
    ),
    (["data.path=rows.jsonl", "data._target_=my.rows"], ["data.path=rows.jsonl", "null beside data._target_"]),
    (["+data.train_sets.mine.weight=2"], ["data.train_sets.mine.path=null", "a file"]),
    (["+data.train_sets.mine.path=x", "data.train_sets.mine.weight=0"], ["data.train_sets.mine.weight=0.0", "above 0"]),
    (["data.path=[]"], ["data.path=[]", "a file, a pattern"]),
    (["data.path=no_rows_*.jsonl"], ["data.path=no_rows_*.jsonl", "a pattern that matches"]),
    (["model=tiny_lora", "weight_sync.mode=delta"], ["weight_sync.mode=delta", "full with model.lora.rank above 0"]),
    (["model=tiny_lora", "weight_sync.transport=ipc"], ["weight_sync.transport=ipc", "auto with model.lora.rank"]),
    (["model=tiny_lora", "weight_sync.verify=first"], ["weight_sync.verify=first", "mode=parity compares adapters"]),
    (["model.lora.targets=[]"], ["model.lora.targets=[]", "[all], or names of linear layers"]),
    (["model.lora.targets=[all,q_proj]"], ["model.lora.targets=", "[all], or names of linear layers"]),
    (
        ["model=tiny_lora", "model.lora.targets=[qproj]"],
        ["model.lora.targets=[qproj]", "[all], or some of down_proj"],
    ),
    (["model.tiny.skill=tools"], ["model.tiny.skill ", "write model=tiny, tiny_qwen35 or tiny_tools"]),
    (["data._target_=rows"], ["data._target_=rows", "my_package.my_module.my_rows"]),
    (["data._target_=no_such.rows"], ["data._target_=no_such.rows", "there is no module no_such"]),
    (["data.args.limit=3"], ["data.args={limit: 3}", "{} without data._target_"]),
    (["+reward.components.format=abc"], ["reward.components.format=abc", "a finite weight"]),
    (
        ["+reward.components.style=0.2"],
        ["reward.components.style=0.2", "weights of exact", "+reward.components.style._t"],
    ),
    (["+reward.components.style=my.style"], ["+reward.components.style._target_="]),
    (
        ["+reward.components.style._target_=my.f", "+reward.components.style.limit=9"],
        ["reward.components.style.limit=9", "weight, _target_ or args", "+reward.components.style.args.limit=9"],
    ),
    (
        ["+reward.components.style._target_=no_such.f"],
        ["reward.components.style._target_=no_such.f", "no module no_such"],
    ),
    (
        ["reward._target_=my.f", "+reward.components.format=0.1"],
        ["+reward.components.f._target_=my.f"],
    ),
    (
        ["reward=my.f"],
        ["reward=my.f", "code, environment, exact, math", "reward._target_=my_module.my_reward"],
    ),
    (["reward._target_=tests.reward.broken.raises"], ["KeyError: 'score' at", "broken.py", "reward.tryout=false"]),
    (["reward._target_=tests.reward.broken.hangs", "reward.timeout_s=2"], ["no result", "reward.timeout_s=2"]),
    (
        ["environment=foo"],
        ["environment=foo", "calculator", "environment._target_=my_module.MyEnvironment"],
    ),
    (["environment._target_=Guess"], ["environment._target_=Guess", "my_package.my_module."]),
    (
        ["environment=tools", "environment._target_=my.Env"],
        ["environment._target_=my.Env", "null with environment=tools"],
    ),
    (["environment=tools"], ["environment.tools=[]", "[my_tools.search] with environment=tools"]),
    (["environment.tools=[my_tools.search]"], ["environment.tools=", "[] with environment=single_turn"]),
    (
        ["environment=tools", "environment.tools=[search]"],
        ["environment.tools=search", "paths such as my_tools.search"],
    ),
    (["model.chat_template=no.jinja"], ["model.chat_template=no.jinja", "an existing file with a Jinja template"]),
    (["environment=verifiers"], ["environment.id=null", "the package of the environment"]),
    (["environment=openenv"], ["environment.url=null", "ws://localhost:8000"]),
    (
        ["environment._target_=my.Env", "environment.id=x"],
        ["environment.id=x", "null with environment._target_=my.Env"],
    ),
    (["environment.args.size=3"], ["environment.args={size: 3}", "{} with environment=single_turn"]),
    (["reward=environment"], ["reward=environment", "another reward with environment=single_turn"]),
    (
        ["environment=tools", "environment.tools=[my_tools.search]", "reward=environment"],
        ["reward=environment", "environment=tools"],
    ),
    (["environment._target_=no_such.Env"], ["environment._target_=no_such.Env", "there is no module no_such"]),
    (["tracking=mine"], ["tracking=mine", "tracking.use=[my_module.MyTracker]"]),
    (["+tracking.mine._target_=my.Tracker"], ["tracking.mine", "tracking.use=[my_module.MyTracker]"]),
    (["train.steps=3"], ["train.steps ", "did you mean steps?"]),
    (
        ["+environment.difficulty=3"],
        ["environment.difficulty ", "+environment.args.difficulty=<value>"],
    ),
    (["tracking.use=[no_such.Tracker]"], ["tracking.use=no_such.Tracker", "no module no_such"]),
    (["tracking.use=[wandb,wandb]"], ["tracking.use=", "wandb is repeated"]),
    (["+tracking.args.url=x"], ["tracking.args=", "without a tracker of your own"]),
    (["reward={parts: {math: 1}}"], ["reward={parts: {math: 1}}", "settings of reward, such as reward._target_"]),
    (["trainer=x"], ["trainer=x", "settings of trainer, such as trainer.lr"]),
    (["--steps=5"], ["--steps=5 ", "steps=5."]),
    (["steps=${oc.env:NOPE}"], ["steps ", "environment variable NOPE"]),
    (["tracking=prometheus", "tracking.port=70000"], ["tracking.port=70000", "65535"]),
    (["tracking.use=wandb,tensorboard"], ["write 'tracking.use=[wandb,tensorboard]', or add -m for a sweep."]),
    (["data.path=a.jsonl,b.jsonl"], ["write 'data.path=[a.jsonl,b.jsonl]', or add -m for a sweep."]),
    (["data.system=Hi,you"], ["write 'data.system=\"Hi,you\"', or add -m for a sweep."]),
    (["algorithm=grpo,dapo"], ["algorithm=grpo,dapo ", "one value, or add -m for a sweep."]),
    (["tracking.project="], ["tracking.project ", "a name"]),
    (["learning_rate=1e-5"], ["learning_rate ", "write trainer.lr=1e-5."]),
    (["+experiment=npu8_fully_async_9b"], ["write experiment=<choice>"]),
    (["algorithm=ppo"], ["algorithm=ppo", "there is no critic"]),
    (["actor_rollout_ref.rollout.name=vllm"], ["actor_rollout_ref.rollout.name", "there is no vLLM backend"]),
    (["data.eval_sets={aime: {pth: x}}"], ["data.eval_sets.aime.pth", "+data.eval_sets.mine.path=FILE"]),
    (["mode=foo"], ["mode=foo", "train", "plan"]),
    (["mode=sft", "placement=fully_async"], ["placement=fully_async", "colocate with mode=sft"]),
    (["mode=sft", "algorithm.ce_coefficient=0.5"], ["algorithm.ce_coefficient=0.5", "1 with mode=sft"]),
    (
        ["mode=sft", "algorithm.kl=k3", "algorithm.kl_coefficient=0.1"],
        ["algorithm.kl=k3", "none with mode=sft"],
    ),
    (["mode=sft", "data.demonstrations=rows.jsonl"], ["data.demonstrations=rows.jsonl", "null with mode=sft"]),
    (["mode=sft", "environment=calculator"], ["environment=calculator", "single_turn with mode=sft"]),
    (["data.demonstrations=nowhere.jsonl"], ["data.demonstrations=nowhere.jsonl"]),
    (["sft=true"], ["sft ", "mode=sft"]),
    (["algorithm=opd"], ["teacher.path=null", "algorithm.reward_coefficient=0"]),
    (["algorithm=opd", "teacher.path=./nowhere"], ["teacher.path=./nowhere", "directory"]),
    (["algorithm=opd", "teacher.path=/tmp"], ["teacher.path=/tmp", "config.json"]),
    (["algorithm=opd", "teacher.path=nobody/nothing"], ["teacher.path=nobody/nothing", "directory"]),
    (["algorithm=opd", "teacher.path=tiny", "rollout.temperature=0.7"], ["rollout.temperature=0.7", "temperature 1"]),
    (["teacher.path=tiny", "teacher.devices=0"], ["teacher.devices=0", "at least 1"]),
    (
        ["teacher.path=tiny", "+teacher.engine_args.speculative-algorithm=EAGLE"],
        ["teacher.engine_args.speculative-algorithm=EAGLE", "null"],
    ),
    (
        ["teacher.path=tiny", "teacher.urls=[http://127.0.0.1:9]"],
        ["teacher.urls=[http://127.0.0.1:9]", "null with teacher.path"],
    ),
    (["mode=sft", "teacher.path=tiny"], ["teacher.path=tiny", "null with mode=sft"]),
    (["algorithm=opd", "teacher.urls=[127.0.0.1:9]"], ["teacher.urls=127.0.0.1:9", "http://host:30000"]),
    (["algorithm=opd", "teacher.urls=[http://127.0.0.1:9]"], ["teacher.urls=http://127.0.0.1:9", "a teacher"]),
    (["teacher.urls=[http://127.0.0.1:9]", "rollout.temperature=0.7"], ["rollout.temperature=0.7", "temperature 1"]),
    (["mode=sft", "teacher.urls=[http://127.0.0.1:9]"], ["teacher.urls=", "null with mode=sft"]),
    (["teacher.prompt='{answer}'", "teacher.path=tiny"], ["teacher.prompt=", "null with teacher.path"]),
    (["teacher.prompt='{question} Again.'"], ["teacher.prompt={question} Again.", "{answer}"]),
    (["teacher.prompt='{answer}'", "teacher.urls=[http://a:1]"], ["teacher.urls=", "null with teacher.prompt"]),
    (["teacher.prompt='{answer}'", "rollout.temperature=0.7"], ["rollout.temperature=0.7", "temperature 1"]),
    (["mode=sft", "teacher.prompt='{answer}'"], ["teacher.prompt=", "null with mode=sft"]),
    (["model=tiny_tools", "environment=calculator", "teacher.prompt='{answer}'"], ["teacher.prompt=", "environment"]),
    (
        ["teacher.prompt='{answer}{question}{question}'", "rollout.max_prompt_tokens=8"],
        ["max_prompt_tokens=8", "least"],
    ),
    (["teacher.urls={sums: [http://127.0.0.1:9]}"], ["teacher.urls=[sums]", "no other: arithmetic"]),
    (["teacher.urls={arithmetic: http://127.0.0.1:9}"], ["teacher.urls.arithmetic=http://127.0.0.1:9", "a list of"]),
    (["teacher.urls={arithmetic: []}"], ["teacher.urls.arithmetic=[]", "a list of addresses"]),
    (
        ["+data.train_sets.a.path=x", "+data.train_sets.b.path=y", "teacher.urls={a: [http://127.0.0.1:9]}"],
        ["teacher.urls=[a]", "a, b"],
    ),
    (["algorithm.group_size=1"], ["algorithm.group_size=1", "at least 2"]),
    (["placement=async"], ["placement=async", "write placement=fully_async"]),
    (["stop.at_accuracy=1.1"], ["stop.at_accuracy=1.1", "up to 1"]),
    (["stop.patience=3", "eval.every=0"], ["eval.every=0", "stop.patience"]),
    (["steps=9", "epochs=2"], ["steps=9", "no steps with epochs=2.0"]),
    (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "give 1", "eval.top_p"]),
    (["rollout.top_k=20"], ["rollout.top_k ", "log-probabilities", "eval.top_k"]),
    (["eval.repetition_penalty=1.1"], ["eval.repetition_penalty "]),
    (["rollout.val_kwargs.top_k=20"], ["rollout.val_kwargs.top_k ", "write eval.top_k=20"]),
    (["rollout.stop=[a,'']"], ["rollout.stop=[a, ]", "none of them empty"]),
    (["rollout.stop=END"], ["rollout.stop=END", "a list of texts"]),
    (["mode=plan", "+rollout.engine_args.speculative-algorithm=NGRAM"], ["engine_args.speculative-algorithm=NGRAM"]),
    (["mode=doctor", "+device.engine_args.rl-on-policy-target=fsdp"], ["device.engine_args.rl-on-policy-target=fsdp"]),
    (["trainer.activation_checkpointing=true"], ["trainer.activation_checkpointing=true", "none, some, all"]),
    (["algorithm.kl=k1"], ["algorithm.kl=k1", "one of none, k2, k3", "zero on average"]),
    (["rollout.tensor_parallel=2"], ["rollout.tensor_parallel=2", "placement.devices=1"]),
    (["placement.max_staleness=1"], ["placement.max_staleness=1", "placement=colocate"]),
    (["placement=fully_async", "placement.stream=on", "algorithm.updates_per_step=2"], ["placement.stream=on", "auto"]),
    (["model.path=/no/such/model"], ["model.path=/no/such/model", "directory"]),
    (["model.path=Qwen/Qwen3-4B"], ["model.path=Qwen/Qwen3-4B ", "model=hf model.path=Qwen/Qwen3-4B."]),
    (["environment=verifiers", "environment.id=x", "data=gsm8k"], ["data.name=gsm8k", "data=environment"]),
    (["environment=verifiers", "environment.id=x", "data.eval_path=x"], ["data.eval_path=x", "null"]),
    (["data=environment"], ["data.name=environment", "environment=single_turn"]),
    (
        ["data=environment", "environment._target_=my.Env"],
        ["data.name=environment", "environment._target_=my.Env"],
    ),
    (["model.path=null"], ["model.path=null", "model directory or a hub id"]),
    (["rollout.max_completion_tokens=3585"], ["at most 3584", "4096 tokens"]),
    (["rollout.max_prompt_tokens=4096"], ["rollout.max_prompt_tokens=4096", "less than 4096, the context"]),
    (["tracking.use=[foo]"], ["tracking.use=foo", "wandb"]),
    (["device=cuda"], ["device=cuda", "give cpu"]),
    (["mode=export"], ["hydra.run.dir=", "checkpoints", "resume=<path>"]),
    (["mode=export", "resume=/no/such/run"], ["resume=/no/such/run", "checkpoints"]),
    (
        ["experiment=cuda4_colocate_4b", "weight_sync.transport=collective"],
        ["weight_sync.transport=collective", "auto or ipc", "placement=colocate", "device=cuda"],
    ),
    (["environment=tools", f"environment.tools=[{MY_TOOLS}.untyped]"], [f"{MY_TOOLS}.untyped", "no type hint"]),
    (["environment=tools", f"environment.tools=[{MY_TOOLS}.search]"], ["data.template=plain", "data.template=chat"]),
    (["environment=verifiers", "environment.id=some-env"], ["verifiers is not installed"]),
    (
        ["environment=openenv", "environment.url=ws://127.0.0.1:9"],
        ["environment.url=ws://127.0.0.1:9", "start the server"],
    ),
    (
        [f"environment._target_={OWN}.Unscored", "reward=environment"],
        ["own_environments.Unscored", "`score(self)`", "reward=environment"],
    ),
]

IN_A_NEW_PROCESS = [
    "steps=abc",
    f"environment=tools environment.tools=[{MY_TOOLS}.search]",
    f"environment._target_={OWN}.Unscored reward=environment",
]


def run(*overrides: str, folder: Path) -> Ended:
    """In a fork of a process that has imported the application: `IN_A_NEW_PROCESS` shows that this is the same."""
    return run_warm(*overrides, f"hydra.run.dir={folder / 'run'}")


def assert_one_sentence(text: str, fragments: list[str]) -> None:
    (line,) = [line for line in text.splitlines() if line.strip()]
    assert line.endswith((".", "?"))
    for fragment in fragments:
        assert fragment in line


@pytest.mark.parametrize(("overrides", "fragments"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_a_wrong_setting_is_refused(overrides: list[str], fragments: list[str], tmp_path: Path) -> None:
    result = run(*overrides, folder=tmp_path)
    assert result.returncode == 2, result.stderr
    assert_one_sentence(result.stderr, fragments)
    assert not (tmp_path / "run").exists()
    allowed = {"torch"} if overrides[0] == "device=cuda" else set()
    assert not {"torch", "sglang"} & set(result.heavy) - allowed


@pytest.mark.parametrize("line", IN_A_NEW_PROCESS)
def test_a_new_process_refuses_the_same_and_leaves_no_process(line: str, start: Callable[..., Run]) -> None:
    """Environments are refused by a worker process."""
    (fragments,) = [fragments for overrides, fragments in REFUSED if " ".join(overrides) == line]
    result = start(*line.split())
    assert result.wait(120) == 2, result.text
    assert_one_sentence(result.text, fragments)
    assert not result.folder.exists()
    assert result.gone_within(10), result.processes()


def test_a_data_file_without_answers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?"}\n{"question": "1+2?"}\n')
    result = run("data=gsm8k", f"data.path={file}", folder=tmp_path)
    assert result.returncode == 2, result.stderr
    assert_one_sentence(result.stderr, ["data.answer=answer", "row 1 of", "data.answer=null"])
    assert not (tmp_path / "run").exists()
