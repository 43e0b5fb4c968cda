"""`mode=doctor` on this machine: passes for the CPU, fails clearly for missing devices, and each check can fail."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.device import Device, device_of
from app.device.cpu import DEVICE as CPU
from app.mode.doctor import ascend, examine, table
from app.mode.doctor import device as doctor_device
from app.mode.doctor import machine as doctor_machine
from app.mode.doctor import software as doctor_software
from app.model.hf_directory import load_tokenizer
from app.start.inputs import CheckStage, CheckStatus, Finding, RunInputs, outcome
from app.start.preflight import findings
from tests.compose import composed
from tests.warm import run_warm

ROOT = Path(__file__).parents[2]
MISSION = ("device=npu", "placement=fully_async", "model=qwen35_9b")


def of(found: Iterable[Finding], subject: str) -> Finding:
    (match,) = [one for one in found if one.subject == subject]
    return match


def inputs(*overrides: str) -> list[Finding]:
    return list(findings(RunInputs(composed(*overrides), CheckStage.doctor, "outputs")))


def test_own_code_is_loaded() -> None:
    found = inputs("reward._target_=tests.reward.broken.right", "tracking=wandb")
    assert of(found, "reward") == Finding("reward", "right; tests.reward.broken.right can be loaded")
    assert {"tracker", "transport", "algorithm"} & {each.subject for each in found} == set()


def test_with_reward_code_the_sandbox_and_the_form_of_the_tests_are_shown(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"text": "Add one.", "code": "def inc(n): return n + 1", "test_list": ["assert inc(1) == 2"]}
    rows.write_text(f"{json.dumps(row)}\n" * 40)
    found = inputs("data=mbpp", "reward=code", f"data.path={rows}", "+reward.args.sandbox=process")
    assert of(found, "tests").message == "asserts in 40 rows"
    assert "process: " in of(found, "sandbox").message

    rows.write_text(f"{json.dumps({**row, 'test_list': ['assert inc(']})}\n" * 40)
    found = inputs("data=mbpp", "reward=code", f"data.path={rows}")
    assert of(found, "code").status is CheckStatus.fail


def test_the_cpu_passes_on_this_machine() -> None:
    found = examine(composed())
    assert [one for one in found if one.status is CheckStatus.fail] == []
    assert of(found, "sglang").status is CheckStatus.ok
    assert not [one for one in found if one.subject == "episodes"]


def test_the_npu_fails_clearly_on_this_machine_and_nothing_starts(tmp_path: Path) -> None:
    done = run_warm("mode=doctor", *MISSION, f"model.path={ROOT}", "data.path=null", cwd=tmp_path)
    assert done.returncode == 1
    for line in ("fail  npu-smi", "fail  torch_npu", "fail  sgl_kernel_npu", "fail  devices", "fail  toolkit"):
        assert line in done.stdout
    assert "torch_npu does not import" in done.stdout
    assert "set_env.sh" in done.stdout
    assert f"free for {tmp_path}/outputs" in done.stdout
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_every_check_that_is_not_ok_has_a_hint() -> None:
    config = composed(*MISSION, f"model.path={ROOT}", "data.path=null")
    device = device_of(config.device.kind)
    checks = [*doctor_software.software(config, device), *doctor_device.hardware(config, device)]
    assert [one for one in checks if one.status is not CheckStatus.ok and not one.hint] == []


def test_the_rows_of_local_files_are_counted(tmp_path: Path) -> None:
    counted = "arithmetic: 2,000 training rows, 200 held-out rows; 60 steps are 0.48 epochs"
    assert of(inputs(), "data") == Finding("data", counted)
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n" + "1+1=,2\n" * 5)
    line = [f"data.path={rows}", "data.name=mine"]
    few, repeated = (each for each in inputs(*line) if each.subject == "data")
    assert few == Finding("data", "mine: 4 training rows, 1 held-out row; 60 steps are 240 epochs")
    assert (repeated.status, "1 of the 1 questions" in repeated.message) == (CheckStatus.warn, True)
    larger = [each.message for each in inputs(*line) if each.subject == "prompts" and each.hint]
    assert larger == ["algorithm.prompts_per_step=16 exceeds the 4 training rows: each step repeats some"]


def test_a_version_outside_the_range_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "installed", {"sglang": "0.5.24", "torch": "2.13.0+cpu"}.get)
    checks = list(doctor_software.software(composed(), CPU))
    assert of(checks, "sglang").status is CheckStatus.fail
    assert of(checks, "torch").status is CheckStatus.ok  # a local version counts as its release
    assert of(checks, "ray").message == "not installed"


def test_torch_npu_must_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(*MISSION)
    device = device_of(config.device.kind)

    def status(torch: str, plugin: str) -> CheckStatus:
        monkeypatch.setattr(doctor_software, "installed", {"torch": torch, "torch_npu": plugin}.get)
        return of(list(doctor_software.software(config, device)), "torch_npu for torch").status

    assert status("2.10.0", "2.10.0.post7") is CheckStatus.ok
    assert status("2.11.0", "2.10.0.post7") is CheckStatus.fail


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu=driver_version) echo 570.124.06; echo 570.124.06 ;;
  --query-gpu=memory.total) echo 81559 ;;
  *) echo NVIDIA-SMI ;;
esac
"""


@pytest.mark.parametrize(
    ("cuda", "status"), [("13.0", CheckStatus.warn), ("12.8", CheckStatus.ok), (None, None), ("14.1", None)]
)
def test_the_driver_is_compared_with_torchs_cuda(
    cuda: str | None, status: CheckStatus | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor_device, "torch_cuda", lambda: cuda)

    config = composed("device=cuda", "model=qwen3_4b")
    checks = list(doctor_device.hardware(config, device_of(config.device.kind)))
    assert of(checks, "nvidia-smi").status is CheckStatus.ok
    drivers = [one for one in checks if one.subject == "driver"]
    assert [one.status for one in drivers] == ([] if status is None else [status])
    if status is CheckStatus.warn:
        assert drivers[0].message == "570.124.06; torch is built for CUDA 13.0, which needs 580 or later"
        assert drivers[0].hint.startswith("update the driver to 580")


@pytest.mark.parametrize("found", [True, False])
def test_the_compiler_and_the_memory_savers_library_are_looked_for(
    found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    if found:
        (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
        (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_device, "library_folders", lambda: ["/pip/lib"] if found else [])
    monkeypatch.setattr(doctor_device, "find_library", lambda _: None)
    compiler, library = doctor_device.nvidia_toolkit(memory_saver=True)
    if found:
        assert (compiler.message, library.message) == (str(tmp_path / "bin" / "nvcc"), "/pip/lib")
    elif not Path("/usr/local/cuda/bin/nvcc").exists():
        assert (compiler.status, library.status) == (CheckStatus.warn, CheckStatus.fail)
    assert [one.subject for one in doctor_device.nvidia_toolkit(memory_saver=False)] == ["nvcc"]


@pytest.fixture
def npu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a driver, CANN and 16 device files, in a folder."""
    for name in ("driver", "dev", "dcmi", f"cann/{platform.machine()}-linux"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("install.info", *(f"dev/davinci{card}" for card in range(16)), "dev/davinci_manager"):
        (tmp_path / name).touch()
    (tmp_path / "driver" / "version.info").write_text("Version=25.5.0\nascendhal_version=7.35.19\n")
    cann_version(tmp_path, "9.1.0")
    names = {"DRIVER": "driver", "INSTALLED": "install.info", "NPU_SMI_LIBRARY": "dcmi"}
    for constant, name in names.items():
        monkeypatch.setattr(ascend, constant, str(tmp_path / name))
    monkeypatch.setattr(ascend, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    for variable in ("NPUS", "TMS_HOOK_MODE", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def cann_version(machine: Path, version: str) -> None:
    file = machine / "cann" / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    file.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\n")


def of_npus(*overrides: str) -> list[Finding]:
    config = composed(*MISSION, *overrides)
    return list(ascend.checks(config, device_of(config.device.kind)))


@pytest.mark.parametrize("placement", ["fully_async", "colocate"])
def test_an_npu_machine_with_everything_passes(placement: str, npu_machine: Path) -> None:
    found = of_npus(f"placement={placement}")
    assert {one.status for one in found} == {CheckStatus.ok}
    assert {"driver version", "CANN version", "device files"} <= {one.subject for one in found}


@pytest.mark.parametrize(
    ("driver", "cann", "fails"),
    [
        ("25.3.rc1.2", "8.3.RC1", set()),
        ("25.5.t3.b001", "9.0.0-beta.2", set()),
        ("25.2.3", "9.1.0", {"driver version"}),
        ("25.3.0", "8.2.RC1", {"CANN version"}),
        ("24.1.rc1", "8.1.RC1", {"driver version", "CANN version"}),
    ],
)
def test_driver_and_cann_have_to_share_memory_between_processes_in_colocate(
    driver: str, cann: str, fails: set[str], npu_machine: Path
) -> None:
    (npu_machine / "driver" / "version.info").write_text(f"Version={driver}\n")
    cann_version(npu_machine, cann)
    for placement, status in {"colocate": CheckStatus.fail, "fully_async": CheckStatus.warn}.items():
        found = of_npus(f"placement={placement}")
        assert {one.subject for one in found if one.status is status} == fails


def test_the_number_of_device_files_is_compared_with_npus(npu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of(of_npus(), "device files").status is CheckStatus.ok
    monkeypatch.setenv("NPUS", "8")
    assert of(of_npus(), "device files").status is CheckStatus.warn
    monkeypatch.setenv("NPUS", "16")
    assert of(of_npus(), "device files").status is CheckStatus.ok


@pytest.mark.parametrize("statement", ["ascend = 1", "nvidia = 1"])
def test_triton_of_npus_has_to_import(
    statement: str, npu_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mainline Triton in its place has no such name."""
    (tmp_path / "path" / "triton" / "_C").mkdir(parents=True)
    (tmp_path / "path" / "triton" / "__init__.py").touch()
    (tmp_path / "path" / "triton" / "_C" / "libtriton.py").write_text(f"{statement}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    assert "triton" not in {one.subject for one in of_npus()}  # not installed: another line says so
    monkeypatch.setattr(ascend, "installed", {"triton_ascend": "3.2.2"}.get)
    expected = CheckStatus.ok if statement.startswith("ascend") else CheckStatus.fail
    assert of(of_npus(), "triton").status is expected


@pytest.mark.parametrize(("name", "value"), [("TMS_HOOK_MODE", "preload"), ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")])
def test_variables_that_release_graph_memory_fail_where_engines_release_memory(
    name: str, value: str, npu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert of(of_npus("placement=colocate"), "memory saver").status is CheckStatus.fail
    assert "memory saver" not in {one.subject for one in of_npus("placement=fully_async")}
    assert "memory saver" not in {one.subject for one in of_npus("placement=colocate", "offload.engine=false")}
    monkeypatch.setenv(name, {"1": "0", "preload": "torch"}[value])
    assert "memory saver" not in {one.subject for one in of_npus("placement=colocate")}


def test_torchs_cuda_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_device.torch_cuda() is None  # the CPU build of this machine
    (tmp_path / "version.py").write_text("debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    monkeypatch.setattr(doctor_device, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert doctor_device.torch_cuda() == "13.0"


def test_the_memory_saver_is_required_in_colocate_only() -> None:
    def subjects(*overrides: str) -> set[str]:
        config = composed("device=cuda", "model=qwen3_4b", *overrides)
        return {one.subject for one in doctor_software.software(config, device_of(config.device.kind))}

    assert "torch_memory_saver" in subjects()
    assert "torch_memory_saver" not in subjects("placement=fully_async")
    assert "torch_memory_saver" not in subjects("offload.engine=false")


def disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=free, total=2**40)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda _: usage)


def test_a_disk_too_small_for_the_checkpoints_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(2**38, monkeypatch)  # 256 GiB
    newest_two = of(inputs(*MISSION), "disk")
    assert newest_two.status is CheckStatus.fail
    needed = (4 * 12 + 4) * 8_953_803_264 / 2**30  # with the best and the one being written, and the export
    assert f" {needed:.1f} GiB" in newest_two.message
    assert of(inputs(*MISSION, "checkpoint.keep=0"), "disk").status is CheckStatus.ok


def test_little_shared_memory_warns_and_dockers_default_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def status(free: int) -> CheckStatus:
        disk_of(free, monkeypatch)
        return of(doctor_machine.machine(), "shared memory").status

    assert status(64 * 2**20) is CheckStatus.fail
    assert status(2**30) is CheckStatus.warn
    assert status(2**34) is CheckStatus.ok


SURROUNDINGS = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}


@pytest.mark.parametrize(
    ("given", "subject", "status"),
    [
        ({}, "locale", CheckStatus.ok),
        ({"LC_ALL": "zh_CN.GB18030"}, "locale", CheckStatus.warn),
        ({"HOME": "/nowhere"}, "home", CheckStatus.warn),
        ({"https_proxy": "http://proxy:3128"}, "proxies", CheckStatus.ok),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "launcher", CheckStatus.warn),
        ({"SLURM_PROCID": "0", "WORLD_SIZE": "1"}, "launcher", CheckStatus.ok),
    ],
)
def test_what_a_run_would_inherit_has_a_line(
    given: dict[str, str], subject: str, status: CheckStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**SURROUNDINGS, "HOME": str(tmp_path), **given})
    names = "gb18030" if "LC_ALL" in given else "utf-8"
    monkeypatch.setattr(doctor_machine.sys, "getfilesystemencoding", lambda: names)
    assert of(doctor_machine.surroundings(), subject).status is status


@pytest.mark.parametrize(("compiles", "status"), [(True, CheckStatus.warn), (False, CheckStatus.ok)])
def test_an_interpreter_whose_path_has_a_space_has_a_line(
    compiles: bool, status: CheckStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "find_spec", lambda name: object() if compiles else None)
    monkeypatch.setattr(doctor_machine.sys, "executable", "/home/my project/.venv/bin/python")
    assert of(doctor_machine.surroundings(), "interpreter").status is status
    monkeypatch.setattr(doctor_machine.sys, "executable", "/home/project/.venv/bin/python")
    assert "interpreter" not in {each.subject for each in doctor_machine.surroundings()}


def test_an_unreachable_hub_fails_with_a_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = of(doctor_machine.reachable(composed("model=qwen3_4b", "data=arithmetic")), "hub")
    assert result.status is CheckStatus.fail
    assert "model.path=..." in result.hint


def test_the_prompts_of_local_files_are_tokenized(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "1+{number}=", "answer": "{1 + number}"}}\n' for number in range(20)))
    line = [f"model.path={tiny_model}", f"data.path={rows}", "data.eval_fraction=0.5", "algorithm.prompts_per_step=8"]
    found = inputs(*line, "data.shuffle=false", "data.suffix=?")
    assert of(found, "prompts") == Finding("prompts", "10 to train on, 10 to evaluate on")
    question = json.loads(of(found, "first prompt").message)
    assert question.startswith("1+")
    assert question.endswith("=?")

    chat = [*line, "data.shuffle=false", "data.template=chat", "data.system=Add."]
    tokenizer = load_tokenizer(tiny_model)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question.removesuffix("?")}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert json.loads(of(inputs(*chat), "first prompt").message) == rendered

    *_, short = (each for each in inputs(*line, "rollout.max_prompt_tokens=4") if each.subject == "prompts")
    assert (short.status, "rollout.max_prompt_tokens=4" in short.message) == (CheckStatus.warn, True)


def test_a_warning_about_the_rows_is_shown_once(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n' * 20)
    text = table(inputs(f"model.path={tiny_model}", f"data.path={rows}", f"data.eval_path={rows}"))
    assert text.count("measures memorization") == 1


def test_the_evaluation_set_that_a_run_will_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    own = of(inputs("model=hf", "model.path=me/model", "data._target_=no_such.halves"), "data")
    assert "evaluation set eval: held-out rows" in own.message
    sets = ["data=rows", f"data.train_sets.mine.path={tmp_path}", "data.eval_sets.far.path=someone/far"]
    missing = of(doctor_machine.reachable(composed(*sets)), "hub")
    assert (missing.status, "someone/far cannot be reached" in missing.message) == (CheckStatus.fail, True)
    assert "data.eval_sets.far.path=" in missing.hint


def test_a_cluster_and_a_server_that_do_not_answer_fail() -> None:
    config = composed("cluster.address=127.0.0.1:9", "rollout.urls=[http://127.0.0.1:9]")
    found = list(doctor_machine.reachable(config))
    assert [of(found, each).status for each in ("cluster", "engine")] == [CheckStatus.fail] * 2


def test_expandable_segments_with_the_memory_saver_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for placement, subjects in (("colocate", {"allocator"}), ("fully_async", set())):
        config = composed("device=cuda", "model=qwen3_4b", f"placement={placement}")
        checks = doctor_device.variables(config, device_of(config.device.kind))
        assert {one.subject for one in checks if one.status is CheckStatus.warn} == subjects


def test_a_conflicting_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    config = composed(*MISSION)
    result = of(doctor_device.variables(config, device_of(config.device.kind)), "variables")
    assert result.message == "HCCL_CONNECT_TIMEOUT=60 is overridden by 1500"


def test_too_few_visible_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(Device, "require", lambda _: None)
    monkeypatch.setattr(Device, "count", lambda _: 4)
    found = of(inputs(*MISSION), "devices")
    assert found.status is CheckStatus.fail
    assert found.message.startswith("placement.rollout_devices=4 is not accepted")
    assert "4 npu available, the run needs 8 (ASCEND_RT_VISIBLE_DEVICES=0,1,2,3)" in found.message
    assert of(inputs(*MISSION, "cluster.address=auto"), "devices").status is CheckStatus.ok


def test_a_plan_that_does_not_fit_warns() -> None:
    config = composed(*MISSION, "device.memory_gib=32")
    result = of(list(doctor_device.hardware(config, device_of(config.device.kind))), "memory")
    assert result.status is CheckStatus.warn
    assert "50.2 of 32.0 GiB" in result.message


def test_the_table_counts_its_lines() -> None:
    found = [outcome("one", True, "fine", "never shown"), outcome("other", False, "bad", "fix it")]
    assert table(found) == "ok    one    fine\nfail  other  bad\n             → fix it\n1 fail, 0 warn, 1 ok"
