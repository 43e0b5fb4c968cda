"""The RayJob files against KubeRay's structure: what its schema demands, and what our command needs."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app.cluster.placement_group import bundles
from app.config.device import DeviceKind
from app.device import device_of
from tests.compose import composed

FOLDER = Path(__file__).parents[2] / "launch" / "kubernetes"
RESOURCES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}


def mapping(required: str, more: bool = False, /, **properties: Any) -> dict[str, Any]:
    """The schema of a mapping, which may have `more` than these properties."""
    names = required.split()
    return {"type": "object", "required": names, "properties": properties, "additionalProperties": more}


def listed(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


MORE = True
TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
STRINGS = {"type": "object", "additionalProperties": TEXT}
CONTAINER = mapping(
    "name image resources",
    MORE,
    envFrom=listed(mapping("secretRef", secretRef=mapping("name", name=TEXT, optional=FLAG))),
    env=listed({**STRINGS, "required": ["name", "value"]}),
    resources=mapping("limits requests", limits=STRINGS, requests=STRINGS),
    volumeMounts=listed(mapping("name mountPath", MORE)),
)
POD = mapping("spec", MORE, spec=mapping("containers", MORE, containers=listed(CONTAINER, 1)))
GROUP = {"rayStartParams": STRINGS, "template": POD}
WORKERS = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT, **GROUP}
CLUSTER = mapping(
    "headGroupSpec",
    rayVersion=TEXT,
    headGroupSpec=mapping("rayStartParams template", **GROUP),
    workerGroupSpecs=listed(mapping("groupName rayStartParams template", **WORKERS)),
)
RAYJOB = mapping(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=mapping("name", MORE),
    spec=mapping(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        rayClusterSpec=CLUSTER,
    ),
)


def load(kind: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"rayjob_{kind}.yaml").read_text())


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_the_file_has_kuberays_structure_a_volume_for_each_mount_and_the_secrets(kind: str) -> None:
    jsonschema.validate(load(kind), RAYJOB)
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
