"""Dry runs of experiments: the devices, CPUs and environment of what would run are those that they compose to."""

import json
from pathlib import Path

import pytest
import yaml

from app.cluster.placement_group import bundles
from app.config import RunConfig
from app.device import Device, device_of
from app.main import conf_path
from tests.compose import composed
from tests.launch.shell import ROOT, bash, dry_run, options

NAMES = sorted(path.stem for path in (Path(conf_path()) / "experiment").glob("*.yaml"))
# One of each number of devices and placement: npu4_colocate, cuda8_fully_async …
EXPERIMENTS = list({name.rpartition("_")[0]: name for name in NAMES}.values())
ON_CARDS = [name for name in EXPERIMENTS if name.startswith(("cuda", "npu"))]
CPUS = 96
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}  # the names that device plugins give


def of(name: str) -> tuple[RunConfig, Device]:
    config = composed(f"experiment={name}")
    return config, device_of(config.device.kind)


def offered(command: list[str], device: Device) -> dict[str, float]:
    """The resources that `ray start` would offer."""
    given = options(command)
    found = {"CPU": float(given["--num-cpus"])} if "--num-cpus" in given else {}
    if "--num-gpus" in given:
        found["GPU"] = float(given["--num-gpus"])
    return {**found, **json.loads(given.get("--resources", "{}"))}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_slurm_offers_the_devices_and_cpus_of_an_experiment(name: str) -> None:
    config, device = of(name)
    environment = {"RAY_AUTH_TOKEN": "x", "SLURM_CPUS_ON_NODE": str(CPUS)}
    commands = dry_run("slurm.sbatch", f"experiment={name}", **environment)
    exported = dict(word.split("=") for command in commands if command[0] == "export" for word in command[1:])
    head, worker, application = [command for command in commands if command[0] == "srun"]

    assert exported == dict(device.machine_env)
    assert [options(step)["--cpus-per-task"] for step in (head, worker, application)] == [str(CPUS)] * 3
    for resource in {device.resource, "CPU"}:
        needed = sum(bundle[resource] for bundle in bundles(config, device))
        assert offered(head, device)[resource] == offered(worker, device)[resource]
        assert 2 * offered(head, device)[resource] >= needed
    if device.resource != "CPU":
        assert 2 * offered(head, device)[device.resource] == config.device_count + config.device_count % 2
    assert f"experiment={name}" in application


@pytest.mark.parametrize("name", ON_CARDS)
def test_docker_passes_the_devices_of_an_experiment(name: str) -> None:
    config, _ = of(name)
    kind = config.device.kind.name
    (command,) = dry_run("docker.sh", kind, f"experiment={name}")
    cards = [word for word in command if word.startswith("--device=/dev/davinci") and word[-1].isdigit()]
    assert (command[command.index("--gpus") + 1] == "all") if kind == "cuda" else (len(cards) >= config.device_count)
    assert command[-2:] == [f"hydra-posttrain:{kind}", f"experiment={name}"]


@pytest.mark.parametrize("name", ON_CARDS)
def test_kubernetes_reserves_the_devices_of_an_experiment_and_continues_its_run_when_it_is_retried(name: str) -> None:
    manifest = bash("launch/kubernetes.sh", "--dry-run", "--name", "mine", f"experiment={name}")
    job = yaml.safe_load(manifest.stdout)["spec"]
    words = job["entrypoint"].split()
    assert {f"experiment={name}", "hydra.run.dir=/storage/outputs/mine"} <= set(words)
    config = composed(*(word for word in words if "=" in word and not word.startswith("hydra.")))
    kind = config.device.kind.name
    assert (config.resume, config.checkpoint.every, job["backoffLimit"]) == ("auto", 50, 2)

    cluster = job["rayClusterSpec"]
    assert f"ray[default]=={cluster['rayVersion']}" in (ROOT / f"launch/requirements/{kind}.txt").read_text()
    workers = cluster["workerGroupSpecs"]
    for group in [cluster["headGroupSpec"], *workers]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        assert "/dev/shm" in [mount["mountPath"] for mount in mounts]
        assert container["envFrom"] == [{"secretRef": {"name": "posttrain-secrets", "optional": True}}]

    (container,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert int(limits[RESOURCES[kind]]) * (1 + workers[0]["replicas"]) == config.device_count
    assert int(limits["cpu"]) >= sum(bundle["CPU"] for bundle in bundles(config, device_of(config.device.kind)))
    started = cluster["headGroupSpec"]["rayStartParams"]
    ray = json.loads(json.loads(started["resources"]))["NPU"] if kind == "npu" else int(started["num-gpus"])
    assert ray == int(limits[RESOURCES[kind]])
    if kind == "npu":
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"
        assert environment["BASH_ENV"] == "/opt/launch/toolkit.sh"


def test_kubernetes_takes_the_nodes_that_a_run_needs() -> None:
    words = ["experiment=npu8_fully_async_9b", "placement.rollout_devices=12", "model.path=/storage/Qwen3.5-9B"]
    given = {"RESOURCE": "huawei.com/ascend-1980", "CPUS": "32", "MEMORY": "256Gi"}
    image = "registry/hydra-posttrain-npu:1"  # which has the default name of the run in it
    options = ["--name", "mine", "--image", image, "--claim", "disk", "--secret", "keys"]
    job = yaml.safe_load(bash("launch/kubernetes.sh", "--dry-run", *options, *words, **given).stdout)
    cluster = job["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        assert pod["containers"][0]["image"] == image
        limits = {"cpu": "32", "memory": "256Gi", "huawei.com/ascend-1980": "8"}
        assert pod["containers"][0]["resources"]["limits"] == limits
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys", "optional": True}}]
        assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert [cluster["workerGroupSpecs"][0][key] for key in ("replicas", "minReplicas", "maxReplicas")] == [1, 1, 1]
    assert "model.path=/storage/Qwen3.5-9B" in job["spec"]["entrypoint"].split()
    assert job["metadata"]["name"] == "mine"


def test_kubernetes_takes_paths_that_only_the_claim_has() -> None:
    words = ["experiment=cuda4_colocate_4b", "algorithm=opd", "teacher.path=/storage/Qwen3-32B"]
    words += ["model.chat_template=/storage/chat.jinja", "model.lora.path=/storage/adapter"]
    job = yaml.safe_load(bash("launch/kubernetes.sh", "--dry-run", *words).stdout)
    assert {*words} <= {*job["spec"]["entrypoint"].split()}
    limits = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "5"  # one of them the teacher's
