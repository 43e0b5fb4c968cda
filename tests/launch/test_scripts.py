"""The launch scripts: linted, with help and a dry run; the parts that need no device are run for real."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from tests.launch.npu_downloads import fetch_npu_packages, fetched_requirements
from tests.launch.shell import PYTHON, ROOT, bash, dry_run, options
from tests.waiting import until

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
SOURCED = ["common.sh", "toolkit.sh"]
OF_IMAGES = ["entrypoint.sh"]  # passes its arguments, --help included, to the application
WITH_HELP = [path.name for path in SCRIPTS if path.name not in SOURCED + OF_IMAGES]
CPUS = ["--device", "cpu", "--devices", "2"]
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


def tool(name: str) -> str:
    """A linter of the development requirements."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed (launch/requirements/cpu.txt brings it)")
    return found


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


@pytest.mark.parametrize(
    "words",
    [
        ["launch/run.sh", "--nonsense"],
        ["launch/ray_cluster.sh"],
        ["launch/ray_cluster.sh", "--device", "npu", "head"],
        ["launch/ray_cluster.sh", "--device", "tpu", "--devices", "8", "head"],
        ["launch/ray_cluster.sh", "--device", "npu", "--devices", "8", "worker"],
        ["launch/docker.sh", "tpu"],
        ["launch/setup.sh"],
        ["launch/setup.sh", "tpu"],
        ["launch/setup.sh", "--nonsense"],
        ["launch/npu_packages.sh"],
    ],
    ids=lambda words: " ".join(words),
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(words: list[str]) -> None:
    done = bash(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_run_checks_the_machine_first() -> None:
    assert dry_run("run.sh", *MISSION) == [
        [PYTHON, "-m", "app", *MISSION, "mode=doctor"],
        [PYTHON, "-m", "app", *MISSION],
    ]


@pytest.mark.parametrize("script", [["run.sh"], ["slurm.sbatch"], ["ray_cluster.sh", *CPUS, "head"]], ids=str)
def test_commands_of_the_environment_that_setup_made_come_before_those_on_the_path(
    script: list[str], tmp_path: Path
) -> None:
    checkout = a_checkout(tmp_path)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "ray"):
        write_program(checkout / ".venv" / "bin" / name, 'echo "x on 1 cpu device(s)"')
    name, *words = script
    done = bash(f"launch/{name}", "--dry-run", *words, cwd=checkout, RAY_AUTH_TOKEN="x")
    assert done.returncode == 0, done.stderr
    run = [word for line in done.stdout.splitlines() for word in line.split() if word.endswith(("python", "ray"))]
    assert run
    assert {str(Path(word).parent) for word in run} == {str(checkout / ".venv" / "bin")}

    other = bash(f"launch/{name}", "--dry-run", *words, cwd=checkout, RAY_AUTH_TOKEN="x", PYTHON=PYTHON)
    assert ".venv/bin/python" not in other.stdout.replace(PYTHON.replace(" ", "\\ "), "")


def test_a_cluster_offers_each_devices_resource() -> None:
    def start(device: str) -> str:
        return bash(
            "launch/ray_cluster.sh", "--dry-run", "--device", device, "--devices", "4", "head", RAY_AUTH_TOKEN="x"
        ).stdout

    assert "--num-cpus=4" in start("cpu")
    assert "--num-gpus=4" in start("cuda")
    assert '--resources={"NPU":4}' in start("npu").replace("\\", "")


JOIN = ["launch/ray_cluster.sh", "--dry-run", "--device", "cuda", "--devices", "8", "worker", "10.0.0.1"]


def test_a_worker_joins_the_head() -> None:
    done = bash(*JOIN, PORT="7000", RAY="ray", RAY_AUTH_TOKEN="of-the-head")
    assert done.stdout.startswith("ray start --address=10.0.0.1:7000 --num-gpus=8")


def test_a_cluster_has_a_token(tmp_path: Path) -> None:
    head = ["launch/ray_cluster.sh", "--dry-run", "--device", "cuda", "--devices", "8", "head"]
    there = {"HOME": str(tmp_path), "RAY": "ray"}
    assert bash(*head, **there).stdout.startswith("ray get-auth-token --generate")
    refused = bash(*JOIN, **there)
    assert refused.returncode == 2
    assert "copy ~/.ray/auth_token from the head" in refused.stderr
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert bash(*head, **there).stdout.startswith("ray start --head")
    assert bash(*JOIN, **there).returncode == 0


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


KEYS = {
    "HF_TOKEN": "hidden",
    "WANDB_API_KEY": "hidden",
    "CLEARML_API_SECRET_KEY": "hidden",
    "HTTPS_PROXY": "hidden",
    "no_proxy": "hidden",
    "NCCL_SOCKET_IFNAME": "hidden",
}
PLACES = {"HF_HOME": "/models/hub", "WANDB_DIR": "hidden", "CLEARML_CONFIG_FILE": "hidden", "UNRELATED": "hidden"}


def after(option: str, command: list[str]) -> set[str]:
    """The values of an option that may be repeated."""
    return {value for name, value in pairwise(command) if name == option}


def test_docker_passes_keys_and_proxies_by_name() -> None:
    (command,) = dry_run("docker.sh", "cuda", **KEYS, **PLACES)
    assert "hidden" not in " ".join(command)
    assert after("-e", command) == {*KEYS, "TORCHINDUCTOR_CACHE_DIR=/root/.cache/inductor"}
    assert "/models/hub:/root/.cache/huggingface" in after("-v", command)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_docker_keeps_what_is_compiled_in_volumes_of_its_kind(kind: str) -> None:
    (command,) = dry_run("docker.sh", kind)
    volumes = dict(mount.split(":")[:2] for mount in after("-v", command) if not mount.startswith("/"))
    assert {f"/root/{each}" for each in (".cache", ".triton", ".tilelang")} <= set(volumes.values())
    assert all(name.startswith(f"hydra-posttrain-{kind}-") for name in volumes)
    assert ("/root/atc_data" in volumes.values()) == (kind == "npu")


def test_docker_mounts_what_settings_and_options_name(tmp_path: Path) -> None:
    for each in ("code", "store", "data"):
        (tmp_path / each).mkdir()
    (tmp_path / "data" / "rows.jsonl").touch()
    (tmp_path / ".netrc").touch()
    rows = tmp_path / "data" / "rows.jsonl"
    settings = [
        "data.path=data/rows.jsonl",
        f"data.eval_sets.mine.path={rows}",
        "model.path=Qwen/Qwen3-4B",
        f"hydra.run.dir={tmp_path}/store/run",
    ]
    words = ["--code", "code", "--mount", "store", "cuda", *settings]
    (command,) = dry_run("docker.sh", *words, cwd=tmp_path, HOME=str(tmp_path))
    assert command[-4:] == settings
    assert {f"PYTHONPATH={tmp_path}/code", f"POSTTRAIN_OUTPUTS={tmp_path}/store/run"} <= {*after("-e", command)}
    assert {
        f"{tmp_path}/code:{tmp_path}/code:ro",
        f"{tmp_path}/store:{tmp_path}/store",
        f"{rows}:/workspace/data/rows.jsonl:ro",
        f"{rows}:{rows}:ro",
        f"{tmp_path}/.netrc:/root/.netrc:ro",
    } <= after("-v", command)


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


def test_docker_mounts_each_path_of_a_sweep(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    words = ["-m", f"data.path={tmp_path}/a.jsonl,{tmp_path}/b.jsonl", "seed=0,1,2"]
    (command,) = dry_run("docker.sh", "cuda", *words, HOME=str(tmp_path))
    assert {f"{tmp_path}/{name}:{tmp_path}/{name}:ro" for name in ("a.jsonl", "b.jsonl")} <= after("-v", command)


def test_docker_composes_in_the_image_where_there_is_no_python(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    docker = write_program(tmp_path / "docker", f'[ "$*" = "$EXPECTED" ] && cat > /dev/null && echo data.path={rows}')
    given = {"PYTHON": "/nowhere/python", "DOCKER": docker, "HOME": str(tmp_path)}
    expected = f"run --rm -i --entrypoint python hydra-posttrain:cuda - data.path={rows}"
    command = bash("launch/docker.sh", "--dry-run", "cuda", f"data.path={rows}", EXPECTED=expected, **given)
    assert f"-v {rows}:{rows}:ro " in command.stdout


def test_a_pod_reaches_each_path_of_the_composed_settings() -> None:
    words = ["experiment=cuda8_fully_async_9b", "model.path=/storage/model", "data.path=[/data/rows/a.jsonl]"]
    done = bash("launch/kubernetes.sh", "--dry-run", *words, PYTHON=PYTHON)
    assert (done.returncode, done.stdout) == (2, "")
    assert "data.path=/data/rows/a.jsonl" in done.stderr
    done = bash("launch/kubernetes.sh", "--dry-run", "--node", "/data", *words, PYTHON=PYTHON)
    assert done.returncode == 0, done.stderr
    for group in ("headGroupSpec", "workerGroupSpecs"):
        made = yaml.safe_load(done.stdout)["spec"]["rayClusterSpec"][group]
        pod = (made[0] if isinstance(made, list) else made)["template"]["spec"]
        (volume,) = [each for each in pod["volumes"] if each.get("hostPath") == {"path": "/data"}]
        mounts = pod["containers"][0]["volumeMounts"]
        assert {"name": volume["name"], "mountPath": "/data", "readOnly": True} in mounts


def test_the_entry_point_uses_the_python_on_the_path_where_there_is_no_venv(tmp_path: Path) -> None:
    write_program(tmp_path / "python", 'echo "$0 $*"')
    image = tmp_path / "opt" / "launch"  # without a .venv beside it
    image.mkdir(parents=True)
    for name in ("entrypoint.sh", "toolkit.sh"):
        (image / name).write_bytes((ROOT / "launch" / name).read_bytes())
    found = bash(str(image / "entrypoint.sh"), "mode=plan", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert found.stdout == f"{tmp_path}/python -m app mode=plan\n"


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        (["resume={store}/run/checkpoints/step_5"], "{store}/run"),
        (["mode=eval", "resume={store}/run"], None),  # whose folder is in outputs/
        (["hydra.run.dir=outputs/mine"], None),
        (["hydra.run.dir={store}/${{now:%H}}"], None),
    ],
)
def test_the_health_check_watches_the_folder_that_a_run_writes(
    settings: list[str], watched: str | None, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    store = tmp_path / "store"
    given = [each.format(store=store) for each in settings]
    (command,) = dry_run("docker.sh", "--mount", "store", "cuda", *given, cwd=tmp_path, HOME=str(tmp_path))
    named = {each for each in after("-e", command) if each.startswith("POSTTRAIN_OUTPUTS=")}
    assert named == ({f"POSTTRAIN_OUTPUTS={watched.format(store=store)}"} if watched else set())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cuda", "data.path=/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
        (["cuda", "hydra.run.dir=runs/mine"], "hydra.run.dir=runs/mine"),
        (["cuda", "resume=/elsewhere/run"], "resume=/elsewhere/run"),
        (["--mount", "/nowhere", "cuda"], "/nowhere"),
    ],
)
def test_docker_refuses_what_the_container_would_lack_or_lose(words: list[str], named: str) -> None:
    done = bash("launch/docker.sh", "--dry-run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


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


def test_setup_for_npus_takes_the_versions_of_the_image(tmp_path: Path) -> None:
    variables = {"TORCH_INDEX_URL": "https://torch.example", "KERNELS_TAG": "2027.1.0"}
    lines = bash("launch/setup.sh", "--dry-run", "npu", cwd=a_checkout(tmp_path), **variables).stdout
    assert "git clone --quiet --depth 1 --branch v0.5.23 https://github.com/sgl-project/sglang " in lines
    assert "/releases/download/2027.1.0/sgl-kernel-npu-2027.1.0-torch2.10.0-py3" in lines
    assert "-cann9.1.0-a3-" in lines
    assert f"{PIP} --index-url https://torch.example torch==2.10.0 torchvision==0.25.0" in lines
    assert "constraints.txt torch_npu==2.10.0.post7" in lines
    assert "-r launch/requirements/npu.txt" in lines


def test_triton_of_npus_is_installed_last_and_imported(tmp_path: Path) -> None:
    """xgrammar brings mainline Triton on x86-64, whose files replace those of triton-ascend."""
    checkout = a_checkout(tmp_path)
    done = bash("launch/setup.sh", "--dry-run", "npu", cwd=checkout, TORCH_INDEX_URL="https://torch.example")
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    installs = [" ".join(words) for words in commands if {"install", "uninstall"} & set(words)]
    *before, removed, restored, application = installs
    assert any("-r launch/requirements/npu.txt" in line for line in before)
    assert removed.endswith("uninstall --yes triton")
    assert restored.endswith("--force-reinstall --no-deps .venv/npu/wheels/triton_ascend*.whl")
    assert application.endswith("--no-deps --editable .")
    assert [".venv/bin/python", "-c", "from triton._C.libtriton import ascend"] in commands

    build = (ROOT / "Dockerfile.npu").read_text()
    steps = ("-r /tmp/application.txt", "uninstall --yes triton", "force-reinstall", "import ascend")
    places = [build.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize("pins", [["memfabric-hybrid==1.1.4", "memfabric-zbal==1.1.2"], ["memfabric-hybrid==1.1.4"]])
def test_a_pin_of_sglang_without_a_wheel_is_removed_where_it_is(pins: list[str], tmp_path: Path) -> None:
    fetch_npu_packages(tmp_path, *pins, "transformers==5.12.1")
    assert fetched_requirements(tmp_path) == ["memfabric-hybrid==1.1.4", "transformers==5.12.1"]


@pytest.mark.parametrize(
    ("pinned", "found", "sentence"),
    [
        ("5.12.1", True, None),
        ("5.14.0", True, "SGLang v1 needs transformers 5.14.0 on NPUs: set TRANSFORMERS_VERSION=5.14.0"),
        ("5.12.1", False, "kernels.example/releases/download/k1/sgl-kernel-npu-k1-torch2-py312-cann9-a3-"),
    ],
    ids=["as pinned", "another transformers", "no such release"],
)
def test_packages_for_npus_that_do_not_fit_end_with_a_sentence(
    pinned: str, found: bool, sentence: str | None, tmp_path: Path
) -> None:
    done = fetch_npu_packages(tmp_path, f"transformers=={pinned}", found=found)
    assert done.returncode == (0 if sentence is None else 2), done.stderr
    assert len(done.stderr.splitlines()) == (sentence is not None)
    assert (sentence or "") in done.stderr


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


def test_setup_leaves_a_venv_of_another_device_alone(tmp_path: Path) -> None:
    checkout = a_checkout(tmp_path)
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "installed").write_text("cuda 0123\n")
    done = bash("launch/quickstart.sh", cwd=checkout)
    assert done.returncode == 2
    assert done.stderr == (
        "setup.sh: the .venv here is for cuda: use .venv/bin/python, or remove .venv to install for cpu\n"
    )


def test_setup_needs_a_supported_python(tmp_path: Path) -> None:
    write_program(tmp_path / "python", '[ "$1" = --version ] && echo Python 3.9.2')
    done = bash("launch/setup.sh", "cpu", cwd=a_checkout(tmp_path), PYTHON=str(tmp_path / "python"))
    assert done.returncode == 2
    assert "is Python 3.9.2; Python 3.11 or 3.12 is needed (set PYTHON=...)" in done.stderr


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
