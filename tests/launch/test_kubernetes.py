"""The RayJob files against KubeRay's structure: what its schema demands, and what our command needs."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app.cluster.placement_group import bundles
from app.config.device import DeviceKind
from app.device import device_of
from app.mode.plan.memory import devices
from tests.compose import composed

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "properties": {
        "envFrom": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["secretRef"],
                "properties": {
                    "secretRef": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "optional": {"type": "boolean"}},
                        "additionalProperties": False,
                    }
                },
                "additionalProperties": False,
            },
        },
        "env": {"type": "array", "items": {**STRINGS, "required": ["name", "value"]}},
        "resources": {
            "type": "object",
            "required": ["limits", "requests"],
            "properties": {"limits": STRINGS, "requests": STRINGS},
            "additionalProperties": False,
        },
        "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    },
}
POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {"containers": {"type": "array", "minItems": 1, "items": CONTAINER}},
        }
    },
}
COUNT = {"type": "integer", "minimum": 0}
RAYJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["entrypoint", "rayClusterSpec"],
            "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": COUNT,
                "backoffLimit": COUNT,
                "rayClusterSpec": {
                    "type": "object",
                    "required": ["headGroupSpec"],
                    "additionalProperties": False,
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "headGroupSpec": {
                            "type": "object",
                            "required": ["rayStartParams", "template"],
                            "additionalProperties": False,
                            "properties": {"rayStartParams": STRINGS, "template": POD},
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["groupName", "rayStartParams", "template"],
                                "additionalProperties": False,
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": COUNT,
                                    "minReplicas": COUNT,
                                    "maxReplicas": COUNT,
                                    "rayStartParams": STRINGS,
                                    "template": POD,
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def load(kind: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"rayjob_{kind}.yaml").read_text())


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_file_has_kuberays_structure(kind: str) -> None:
    jsonschema.validate(load(kind), RAYJOB)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_every_mount_has_its_volume(kind: str) -> None:
    cluster = load(kind)["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == names
        assert any(mount["mountPath"] == "/dev/shm" for mount in pod["containers"][0]["volumeMounts"])


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_entrypoint_composes_and_its_devices_are_there(kind: str) -> None:
    job = load(kind)["spec"]
    words = job["entrypoint"].split()
    config = composed(*(word for word in words if "=" in word and not word.startswith("hydra.")))
    assert config.device.kind.name == kind
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    limits = head["resources"]["limits"]
    assert int(limits[RESOURCES[kind]]) == devices(config) == 8
    needed = bundles(config, device_of(DeviceKind(kind)))
    assert int(limits["cpu"]) >= sum(bundle["CPU"] for bundle in needed)


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_job_that_is_retried_continues_its_run(kind: str) -> None:
    job = load(kind)["spec"]
    config = composed(*(word for word in job["entrypoint"].split() if "=" in word and not word.startswith("hydra.")))
    assert (config.resume, config.checkpoint.every) == ("auto", 50)
    assert job["backoffLimit"] == 2
    assert f"hydra.run.dir=/storage/outputs/posttrain-{kind}" in job["entrypoint"].split()


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_secrets_reach_every_container(kind: str) -> None:
    cluster = load(kind)["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "posttrain-secrets", "optional": True}}]


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
