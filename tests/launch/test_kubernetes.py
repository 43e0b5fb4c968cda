"""The RayJob files: volumes, secrets, devices and the run that their command composes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cluster.placement_group import bundles
from app.config.device import DeviceKind
from app.device import device_of
from tests.compose import composed

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}


def load(kind: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"rayjob_{kind}.yaml").read_text())


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_pod_has_a_volume_for_each_mount_and_the_secrets(kind: str) -> None:
    cluster = load(kind)["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
        assert "/dev/shm" in [mount["mountPath"] for mount in mounts]
        assert container["envFrom"] == [{"secretRef": {"name": "posttrain-secrets", "optional": True}}]


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_entrypoint_composes_has_its_devices_and_continues_its_run_when_it_is_retried(kind: str) -> None:
    job = load(kind)["spec"]
    words = job["entrypoint"].split()
    config = composed(*(word for word in words if "=" in word and not word.startswith("hydra.")))
    assert config.device.kind.name == kind
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    limits = head["resources"]["limits"]
    assert int(limits[RESOURCES[kind]]) == config.device_count == 8
    needed = bundles(config, device_of(DeviceKind(kind)))
    assert int(limits["cpu"]) >= sum(bundle["CPU"] for bundle in needed)

    assert (config.resume, config.checkpoint.every, job["backoffLimit"]) == ("auto", 50, 2)
    assert f"hydra.run.dir=/storage/outputs/posttrain-{kind}" in words


def test_ray_on_npus_offers_the_resource_that_we_reserve() -> None:
    head = load("npu")["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["resources"] == '"{\\"NPU\\": 8}"'
    environment = {each["name"]: each["value"] for each in head["template"]["spec"]["containers"][0]["env"]}
    assert environment["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert environment["BASH_ENV"] == "/opt/launch/toolkit.sh"


def test_the_cluster_runs_the_ray_of_the_requirements() -> None:
    for kind in ("cuda", "npu"):
        version = load(kind)["spec"]["rayClusterSpec"]["rayVersion"]
        assert f"ray[default]=={version}" in (FOLDER.parent / "requirements" / f"{kind}.txt").read_text()
