"""Where the processes of a run live: one placement group of workers, optimizer actors beside them.

Placement groups cannot be resized and an infeasible one waits for ever without a word, so what is
asked for is first compared with what the cluster has.
"""

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from flatpeak.controller.spec import Spec
from flatpeak.workers.actors import OptimizerActor, TrainWorker
from flatpeak.workers.errors import ClusterError


@dataclass(frozen=True)
class Placed:
    """An actor with the name it has in messages and the node it lives on."""

    name: str
    handle: Any
    node: str


def pick_device(spec: Spec) -> str:
    """ "cuda" or "cpu"; refuses CUDA when the cluster has too few free GPUs."""
    wanted, gpus = spec.cluster.workers, int(ray.cluster_resources().get("GPU", 0))
    if spec.cluster.device == "cpu" or (spec.cluster.device == "auto" and gpus == 0):
        return "cpu"
    free = int(ray.available_resources().get("GPU", 0))
    if free < wanted:
        raise ClusterError(
            f"cluster.workers = {wanted} needs as many GPUs, but {free} of the cluster's {gpus} "
            "are free; lower cluster.workers, add nodes, or set cluster.device to cpu"
        )
    return "cuda"


def reserve_workers(spec: Spec, device: str) -> PlacementGroup:
    """One bundle a worker. Raises ClusterError with the numbers when they do not come in time."""
    bundle = {"CPU": float(spec.cluster.cpus_per_worker)} | (
        {"GPU": 1.0} if device == "cuda" else {}
    )
    needed = {name: amount * spec.cluster.workers for name, amount in bundle.items()}
    total = ray.cluster_resources()
    short = {name: total.get(name, 0) for name in needed if total.get(name, 0) < needed[name]}
    if short:
        raise ClusterError(
            f"{spec.cluster.workers} workers need {needed}, but the whole cluster has {short}; "
            "lower cluster.workers or cluster.cpus_per_worker, or add nodes"
        )
    group = placement_group([bundle] * spec.cluster.workers, strategy="PACK")
    if not group.wait(spec.cluster.start_timeout_s):
        state = placement_group_table(group).get("stats", {}).get("scheduling_state", "unknown")
        remove_placement_group(group)
        raise ClusterError(
            f"{spec.cluster.workers} workers with {bundle} each were not placed within "
            f"cluster.start_timeout_s = {spec.cluster.start_timeout_s:g} s (Ray says {state}); "
            f"free now: {ray.available_resources()}"
        )
    return group


def start_workers(spec: Spec, group: PlacementGroup, device: str, logs: str) -> list[Any]:
    actor = ray.remote(TrainWorker)
    # A rank whose gloo listens on a public address would be open to the network for nothing.
    local = {"GLOO_SOCKET_IFNAME": "lo"} if spec.cluster.address == "local" else {}
    return [
        actor.options(
            name=f"flatpeak-{spec.run}-worker-{rank}",
            num_cpus=spec.cluster.cpus_per_worker,
            num_gpus=1 if device == "cuda" else 0,
            max_restarts=0,
            runtime_env={"env_vars": local},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(spec, rank, device, logs)
        for rank in range(spec.cluster.workers)
    ]


def start_optimizers(spec: Spec, nodes: list[str], logs: str) -> list[Placed]:
    """Optimizer actors, spread in turn over the nodes that hold workers.

    A worker reaches its buckets through shared memory, so every such node needs an actor.
    """
    if spec.cluster.optimizers < len(nodes):
        raise ClusterError(
            f"the workers live on {len(nodes)} nodes, so cluster.optimizers must be at least "
            f"{len(nodes)}, not {spec.cluster.optimizers}"
        )
    actor = ray.remote(OptimizerActor)
    placed = []
    for index in range(spec.cluster.optimizers):
        node = nodes[index % len(nodes)]
        handle = actor.options(
            name=f"flatpeak-{spec.run}-optimizer-{index}",
            num_cpus=spec.cluster.cpus_per_optimizer,
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,  # an update is not idempotent
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(spec, index, logs)
        placed.append(Placed(f"optimizer {index}", handle, node))
    return placed


def release(group: PlacementGroup | None, actors: list[Any], *, patience_s: float = 10.0) -> None:
    """Ends the actors, then their placement group; returns when Ray has taken both back."""
    for actor in actors:
        ray.kill(actor)
    if group is None:
        return
    remove_placement_group(group)
    deadline = time.monotonic() + patience_s
    while placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
        time.sleep(0.05)
