"""Two Ray nodes on this machine: the devices of ranks and engines, the error when some are missing, and a run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.runs import Run

SCRIPT = """
import asyncio, json, os, sys
import ray
from app.device import device_of
from app.errors import RunError
from app.cluster.connect import connect
from app.cluster.placement_group import reserve
from app.rollout.engine.server_connection import own_devices
from tests.compose import composed

results = {}
for name, overrides in json.loads(sys.argv[2]).items():
    config = composed(*overrides, f"cluster.address={sys.argv[1]}")
    device = device_of(config.device.kind)
    asyncio.run(connect(config, device))
    try:
        placement = asyncio.run(reserve(config, device))

        class Actor:
            def where(self):
                context = ray.get_runtime_context()
                return context.get_node_id(), context.get_accelerator_ids().get(device.resource, [])

            def own(self):
                return own_devices((device.resource, device.visibility))

        make = lambda options: ray.remote(Actor).options(**options).remote()
        ranks = [make(placement.rank_options(rank)) for rank in range(config.placement.trainer_ranks)]
        engines = [make(placement.engine_options(engine)) for engine in range(config.engines)]
        results[name] = {
            "ranks": ray.get([actor.where.remote() for actor in ranks]),
            "engines": [
                [
                    ray.get(actor.where.remote())[0],
                    {**placement.engine_environment(engine), **ray.get(actor.own.remote())},
                ]
                for engine, actor in enumerate(engines)
            ],
        }
    except RunError as error:
        results[name] = str(error)
    finally:
        ray.shutdown()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Callable[..., str]]:
    """Starts clusters of two nodes with the same resources; returns their addresses."""
    from ray.cluster_utils import Cluster

    clusters = []

    def start(**node: Any) -> str:
        cluster = Cluster()
        clusters.append(cluster)
        for _ in range(2):
            cluster.add_node(object_store_memory=128 * 1024 * 1024, include_dashboard=False, **node)
        cluster.wait_for_nodes(60)
        return str(cluster.address)

    yield start
    for cluster in clusters:
        cluster.shutdown()


def last_line_of(script: str, *arguments: str) -> Any:
    """The JSON that a script prints last."""
    command = [sys.executable, "-c", script, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_devices_are_shared_out_over_two_nodes(device: str, variable: str, two_nodes: Callable[..., str]) -> None:
    node = {"num_gpus": 2} if device == "cuda" else {"resources": {"NPU": 2}}
    address = two_nodes(num_cpus=8, **node)
    common = [f"device={device}", "model=qwen3_4b"]
    split = ["placement=fully_async", "placement.trainer_devices=2", "placement.rollout_devices=2"]
    cases = {
        "colocate": [*common, "placement=colocate", "placement.devices=4", "rollout.tensor_parallel=2"],
        "uneven": [*common, "placement=colocate", "placement.devices=3", "rollout.tensor_parallel=3"],
        "fully_async": [*common, *split, "rollout.tensor_parallel=2"],
        "too many": [*common, "placement=colocate", "placement.devices=8", "cluster.timeout_s=3"],
    }
    found = last_line_of(SCRIPT, address, json.dumps(cases))
    ranks = [(node, *numbers) for node, numbers in found["colocate"]["ranks"]]
    assert len(set(ranks)) == 4  # each its own device
    assert len({node for node, _ in ranks}) == 2
    for engine, (host, environment) in enumerate(found["colocate"]["engines"]):
        beside = ranks[2 * engine : 2 * engine + 2]
        assert {each for each, _ in beside} == {host}
        assert environment == {variable: ",".join(number for _, number in beside)}
    taken = {(node, *numbers) for node, numbers in found["fully_async"]["ranks"]}
    ((host, environment),) = found["fully_async"]["engines"]
    taken |= {(host, number) for number in environment[variable].split(",")}
    assert len(taken) == 4  # no device is shared
    assert "rollout.tensor_parallel=3" in str(found["uneven"])
    resource = "GPU" if device == "cuda" else "NPU"
    assert f"8 {resource} (placement=colocate)" in str(found["too many"])


MOVED = """
import asyncio, json
import ray
from ray.cluster_utils import Cluster
from app.device import device_of
from app.cluster.connect import connect
from app.cluster.placement_group import reserve
from app.rollout.engine.server_connection import own_devices
from tests.compose import composed

def node(gpus):
    return cluster.add_node(num_cpus=4, num_gpus=gpus, object_store_memory=128 * 1024 * 1024, include_dashboard=False)

class Actor:
    def own(self):
        return own_devices(("GPU", "CUDA_VISIBLE_DEVICES"))

def devices(options):
    actor = ray.remote(Actor).options(**options).remote()
    return ray.get(actor.own.remote(), timeout=120), actor

async def scenario():
    config = composed(
        "device=cuda", "model=qwen3_4b", f"cluster.address={cluster.address}", "placement=colocate",
        "placement.devices=2", "rollout.tensor_parallel=2",
    )
    await connect(config, device_of(config.device.kind))
    placement = await reserve(config, device_of(config.device.kind))
    before = placement.engine_environment(0)

    other = node(5)
    taken = devices({"num_gpus": 3, "num_cpus": 0})  # devices 0 to 2 of the other node
    cluster.remove_node(first)
    await placement.locate_ranks()
    ranks = [devices(placement.rank_options(rank)) for rank in range(2)]
    return [before, taken[0], placement.engine_environment(0), *(own for own, _ in ranks)]

cluster = Cluster()
node(0)
first = node(2)
cluster.wait_for_nodes(60)
print(json.dumps(asyncio.run(scenario())))
"""


@pytest.mark.slow
def test_after_the_loss_of_a_node_engines_get_the_numbers_of_the_devices_that_ranks_have_now() -> None:
    variable = "CUDA_VISIBLE_DEVICES"
    expected = [{variable: "0,1"}, {variable: "0,1,2"}, {variable: "3,4"}, {variable: "3"}, {variable: "4"}]
    assert last_line_of(MOVED) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_over_two_nodes(two_nodes: Callable[..., str], start: Callable[..., Run]) -> None:
    """One core each: the trainer's rank on one node, the engine on the other."""
    address = two_nodes(num_cpus=1)
    run = start("placement=fully_async", f"cluster.address={address}", "steps=4", "data.arithmetic.eval_problems=20")
    assert run.wait(300) == 0, run.text
    assert [line["step"] for line in run.metrics() if "time/step" in line] == [1, 2, 3, 4]
    assert run.gone_within(15), run.processes()
