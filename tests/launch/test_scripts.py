"""The launch scripts: linted, with help and a dry run; the parts that need no device are run for real."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launch.shell import (
    PYTHON,
    ROOT,
    bash,
    dry_run,
    fetch_npu_packages,
    fetched_requirements,
    options,
    tool,
)
from tests.waiting import until

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
SOURCED = ["common.sh", "toolkit.sh"]
OF_IMAGES = ["entrypoint.sh"]  # passes its arguments, --help included, to the application
WITH_HELP = [path.name for path in SCRIPTS if path.name not in SOURCED + OF_IMAGES]
MISSION = ["device=npu", "placement=fully_async", "model=qwen35_9b"]


def a_checkout(folder: Path) -> Path:
    """What the launch scripts read, without a .venv."""
    shutil.copytree(ROOT / "launch", folder / "checkout" / "launch")
    for name in ("pyproject.toml", "Dockerfile.npu"):
        shutil.copy(ROOT / name, folder / "checkout")
    return folder / "checkout"


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([tool("shellcheck"), *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.parametrize("name", WITH_HELP)
def test_help_shows_a_command_of_the_script_itself_and_installs_nothing(name: str, tmp_path: Path) -> None:
    checkout = a_checkout(tmp_path)
    done = bash(f"launch/{name}", "--help", cwd=checkout, PYTHON="false", PATH=os.environ["PATH"])
    assert done.returncode == 0
    assert not (checkout / ".venv").exists()
    assert f"launch/{name}" in done.stdout
    assert "set -euo" not in done.stdout


def test_run_checks_the_machine_first() -> None:
    assert dry_run("run.sh", *MISSION) == [
        [PYTHON, "-m", "app", *MISSION, "mode=doctor"],
        [PYTHON, "-m", "app", *MISSION],
    ]


@pytest.mark.parametrize(
    ("device", "name", "value"),
    [("cpu", "--num-cpus", "4"), ("cuda", "--num-gpus", "4"), ("npu", "--resources", '{"NPU":4}')],
)
def test_a_cluster_offers_each_devices_resource(device: str, name: str, value: str) -> None:
    commands = dry_run("ray_cluster.sh", "--device", device, "--devices", "4", "head", RAY_AUTH_TOKEN="x")
    assert options(commands[-1])[name] == value


def test_a_cluster_has_a_token(tmp_path: Path) -> None:
    cluster = ["launch/ray_cluster.sh", "--dry-run", "--device", "cuda", "--devices", "8"]
    head, worker = [*cluster, "head"], [*cluster, "worker", "10.0.0.1"]
    there = {"HOME": str(tmp_path), "RAY": "ray"}
    assert bash(*head, **there).stdout.startswith("ray get-auth-token --generate")
    refused = bash(*worker, **there)
    assert refused.returncode == 2
    assert "copy ~/.ray/auth_token from the head" in refused.stderr
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert bash(*head, **there).stdout.startswith("ray start --head")
    assert bash(*worker, **there).returncode == 0


def test_slurm_starts_a_head_a_worker_and_the_application() -> None:
    _, head, worker, application = dry_run(
        "slurm.sbatch", *MISSION, DEVICES="8", RAY_AUTH_TOKEN="x", SLURM_CPUS_PER_TASK="32", SLURM_CPUS_ON_NODE="96"
    )
    assert [options(step)["--nodelist"] for step in (head, worker, application)] == ["node0", "node1", "node0"]
    assert head[head.index("start") + 1] == "--head"
    assert options(worker)["--address"] == "node0:6379"
    assert {options(step)["--cpus-per-task"] for step in (head, worker, application)} == {"32"}
    python = application.index(PYTHON)
    assert application[python:] == [
        PYTHON, "-m", "app", "cluster.timeout_s=600", *MISSION, "cluster.address=node0:6379",
    ]  # fmt: skip


def slurm_stand_in(folder: Path) -> dict[str, str]:
    """Commands named as Slurm's that run what they are given on this machine."""
    folder.mkdir()
    noset = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    commands = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo here",
        # --block; status answers at once
        "ray": f'if [ "$1" = start ]; then echo "${{{noset}-}} $*" > "$RAN.ray"; exec sleep 60; fi',
        "python": f"""if [ "${{@: -1}}" = mode=plan ]; then exec {shlex.quote(PYTHON)} "$@"; fi
trap "exit 130" TERM
echo "$@" > "$RAN"
if [ "$4" = seed=1 ]; then sleep 60 & wait; fi
exit 7""",
    }
    for name, body in commands.items():
        write_program(folder / name, body)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(folder / "python"),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "RAN": str(folder / "ran"),
        "RAY_AUTH_TOKEN": "of-the-nodes",
    }


def test_a_slurm_job_ends_with_the_applications_exit_code(tmp_path: Path) -> None:
    environment = slurm_stand_in(tmp_path / "bin")
    assert bash("launch/slurm.sbatch", "experiment=npu8_fully_async_9b", **environment).returncode == 7
    ran = (tmp_path / "bin" / "ran").read_text()
    assert ran == "-m app cluster.timeout_s=600 experiment=npu8_fully_async_9b cluster.address=here:6379\n"
    noset, *started = (tmp_path / "bin" / "ran.ray").read_text().split()
    assert noset == "1"
    assert options(started)["--resources"] == '{"NPU":8}'


def test_slurms_warning_reaches_the_application(tmp_path: Path) -> None:
    environment = slurm_stand_in(tmp_path / "bin")
    job = subprocess.Popen(["bash", "launch/slurm.sbatch", "seed=1"], cwd=ROOT, env={**os.environ, **environment})
    until((tmp_path / "bin" / "ran").exists, 60)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 130


def test_docker_gets_the_devices_and_the_driver_of_npus(tmp_path: Path) -> None:
    command = bash("launch/docker.sh", "--dry-run", "npu", *MISSION, NPUS="2").stdout
    assert "--device=/dev/davinci0 --device=/dev/davinci1 --device=/dev/davinci_manager" in command
    assert "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro" in command
    assert command.rstrip().endswith(f"hydra-posttrain:npu {' '.join(MISSION)}")

    # The library of npu-smi, where the machine has it.
    there, missing = (dry_run("docker.sh", "npu", DCMI=str(tmp_path / name))[0] for name in ("", "missing"))
    assert f"{tmp_path}:/usr/local/dcmi:ro" in after("-v", there)
    assert not any("dcmi" in mount for mount in after("-v", missing))


def after(option: str, command: list[str]) -> set[str]:
    """The values of an option that may be repeated."""
    return {value for name, value in pairwise(command) if name == option}


@pytest.mark.parametrize(
    ("written", "mounted"),
    [
        ('data.path="{folder}/my data/rows.jsonl"', ["my data/rows.jsonl"]),
        ("data.path=[{folder}/a.jsonl,{folder}/b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data.path={folder}/*.jsonl", [""]),
        ("data.path={folder}/数据.jsonl", ["数据.jsonl"]),
        ("data.eval_sets={{mine: {{path: {folder}/a.jsonl}}, same: {{path: {folder}/a.jsonl}}}}", ["a.jsonl"]),
        ("+reward.args.lexicon={folder}/a.jsonl", ["a.jsonl"]),
        ("+reward.args.lexicon=/nowhere/a.jsonl", []),
    ],
)
def test_docker_mounts_each_path_of_the_composed_settings(written: str, mounted: list[str], tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    for name in ("a.jsonl", "b.jsonl", "数据.jsonl", "my data/rows.jsonl"):
        (tmp_path / name).touch()
    home = {"HOME": str(tmp_path / "my data"), "LC_ALL": "C.UTF-8"}
    (command,) = dry_run("docker.sh", "cuda", written.format(folder=tmp_path), **home)
    paths = [str(tmp_path / name) for name in mounted]
    volumes = [value for name, value in pairwise(command) if name == "-v" and value.endswith(":ro")]
    assert volumes == [f"{path}:{path}:ro" for path in paths]


PIP = ".venv/bin/python -m pip --disable-pip-version-check --quiet install --no-compile"
# Stands in for Python: `-m venv` makes a .venv whose python writes its arguments to pip.txt.
STAND_IN = """case $1 in
  -c) echo 3.12 ;;
  -m)
    mkdir -p .venv/bin
    printf '#!/usr/bin/env bash\\necho "$@" >> pip.txt\\n' > .venv/bin/python
    chmod +x .venv/bin/python
    ;;
esac
"""


def test_setup_for_a_cpu_takes_torch_from_its_own_index(tmp_path: Path) -> None:
    run = partial(bash, "launch/setup.sh", "--dry-run", "cpu", cwd=a_checkout(tmp_path))
    lines = run(TORCH_INDEX_URL="https://torch.example").stdout
    first = f"{PIP} --index-url https://torch.example torch==2.13.0"
    assert first in lines
    assert lines.index(first) < lines.index("-r launch/requirements/cpu.txt")
    assert "--index-url" not in run(TORCH_INDEX_URL="").stdout


def test_setup_for_npus_takes_the_versions_of_the_image_and_its_triton_is_last_and_imported(tmp_path: Path) -> None:
    """xgrammar brings mainline Triton on x86-64, whose files replace those of triton-ascend."""
    variables = {"TORCH_INDEX_URL": "https://torch.example", "KERNELS_TAG": "2027.1.0"}
    lines = bash("launch/setup.sh", "--dry-run", "npu", cwd=a_checkout(tmp_path), **variables).stdout
    assert "git clone --quiet --depth 1 --branch v0.5.23 https://github.com/sgl-project/sglang " in lines
    assert "/releases/download/2027.1.0/sgl-kernel-npu-2027.1.0-torch2.10.0-py3" in lines
    assert "-cann9.1.0-a3-" in lines
    assert f"{PIP} --index-url https://torch.example torch==2.10.0 torchvision==0.25.0" in lines
    assert "constraints.txt torch_npu==2.10.0.post7" in lines

    commands = [shlex.split(line) for line in lines.splitlines()]
    installs = [" ".join(words) for words in commands if {"install", "uninstall"} & set(words)]
    *before, removed, restored, application = installs
    assert any("-r launch/requirements/npu.txt" in line for line in before)
    assert removed.endswith("uninstall --yes triton")
    assert restored.endswith("--force-reinstall --no-deps .venv/npu/wheels/triton_ascend*.whl")
    assert application.endswith("--no-deps --editable .")
    assert [".venv/bin/python", "-c", "from triton._C.libtriton import ascend; import datasets, pyarrow"] in commands

    build = (ROOT / "Dockerfile.npu").read_text()
    steps = ("-r /tmp/application.txt", "uninstall --yes triton", "force-reinstall", "import ascend")
    places = [build.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize("pins", [["memfabric-hybrid==1.1.4", "memfabric-zbal==1.1.2"], ["memfabric-hybrid==1.1.4"]])
def test_a_pin_of_sglang_without_a_wheel_is_removed_where_it_is(pins: list[str], tmp_path: Path) -> None:
    fetch_npu_packages(tmp_path, *pins, "transformers==5.12.1")
    assert fetched_requirements(tmp_path) == ["memfabric-hybrid==1.1.4", "transformers==5.12.1"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_setup_installs_once_and_again_when_the_requirements_change(device: str, tmp_path: Path) -> None:
    checkout = a_checkout(tmp_path)
    python = write_program(tmp_path / "python", STAND_IN)
    script, requirements = "launch/torchvision_operators.py", "launch/requirements"
    expected = {
        "cpu": [f"-r {requirements}/cpu.txt", f"--no-deps -r {requirements}/cpu-no-deps.txt", script],
        "cuda": [f"-r {requirements}/cuda.txt"],
    }[device]

    def installs() -> int:
        done = bash("launch/setup.sh", device, cwd=checkout, PYTHON=python)
        assert done.returncode == 0, done.stderr
        return (checkout / "pip.txt").read_text().count(" install ")

    count = installs()
    ran = [line.rpartition("--no-compile ")[2].strip() for line in (checkout / "pip.txt").read_text().splitlines()]
    assert ran[:-1] == [*expected, "--no-deps --editable ."]
    assert ran[-1].startswith("-m compileall")
    assert installs() == count
    with (checkout / "launch" / "requirements" / f"{device}.txt").open("a") as file:
        file.write("one-more==1.0\n")
    assert installs() == 2 * count

    (checkout / ".venv" / "installed").unlink()
    write_program(checkout / ".venv" / "bin" / "python", "exit 1")  # without pip
    assert installs() == 3 * count


def test_the_entrypoint_becomes_the_application_within_the_toolkits_environment(tmp_path: Path) -> None:
    root = ascend(tmp_path, "cann")
    write_program(tmp_path / "python", 'echo "$$ $TOOLKIT $*"; exit 3')
    started = subprocess.Popen(
        ["bash", "launch/entrypoint.sh", *MISSION],
        cwd=ROOT,
        env={"PYTHON": str(tmp_path / "python"), "PATH": os.environ["PATH"], "ASCEND_ROOT": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = started.communicate(timeout=30)
    assert said == f"{started.pid} cann -m app {' '.join(MISSION)}\n"  # the shell's own pid: signals reach it
    assert started.returncode == 3


def ascend(folder: Path, *packages: str) -> Path:
    """A folder like /usr/local/Ascend. Each package's set_env.sh adds its name to TOOLKIT."""
    for package in packages:
        (folder / "Ascend" / package).mkdir(parents=True)
        # As CANN's: it reads variables that may be unset, and its last command may fail.
        (folder / "Ascend" / package / "set_env.sh").write_text(f"export TOOLKIT=${{TOOLKIT}}{package}\nfalse\n")
    return folder / "Ascend"


@pytest.mark.parametrize(
    ("packages", "loaded"),
    [
        (["ascend-toolkit"], "ascend-toolkit"),
        (["cann"], "cann"),
        (["cann", "ascend-toolkit"], "cann"),
        (["ascend-toolkit", "nnal/atb"], "ascend-toolkitnnal/atb"),
        (["cann", "cann/share/info/ascendnpu-ir/bin"], "canncann/share/info/ascendnpu-ir/bin"),
        ([], ""),
    ],
)
def test_the_toolkit_is_found_in_new_and_old_folders_of_cann(packages: list[str], loaded: str, tmp_path: Path) -> None:
    root = ascend(tmp_path, *packages)
    done = bash("-euc", 'source launch/toolkit.sh; echo "${TOOLKIT-} $-"', ASCEND_ROOT=str(root))
    assert (done.returncode, done.stderr) == (0, "")
    found, flags = done.stdout.split(" ")
    assert found == loaded
    assert {"e", "u"} <= set(flags)


def test_a_container_is_healthy_while_its_run_writes(tmp_path: Path) -> None:
    assert bash("launch/healthcheck.sh", str(tmp_path)).returncode == 1
    written = tmp_path / "run" / "logs" / "engine_0.log"
    written.parent.mkdir(parents=True)
    written.write_text("tokens")
    assert bash("launch/healthcheck.sh", str(tmp_path)).returncode == 0
    hour_ago = time.time() - 3600
    os.utime(written, (hour_ago, hour_ago))
    assert bash("launch/healthcheck.sh", str(tmp_path)).returncode == 1
    assert bash("launch/healthcheck.sh", str(tmp_path), HEALTH_MINUTES="90").returncode == 0
