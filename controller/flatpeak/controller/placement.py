"""Where the processes of a run live: one placement group of workers, and optimizer actors, beside
them or on any node.

Placement groups cannot be resized and an infeasible one waits for ever without a word, so what is
asked for is first compared with what the cluster has.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
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

from flatpeak.controller.leftovers import remove_arenas
from flatpeak.controller.lives import ArenaFile, Left, mirrored, sized
from flatpeak.controller.spec import ClusterSpec, Spec
from flatpeak.workers.actors import HEARTBEAT, OptimizerActor, TrainWorker
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.errors import ClusterError, StateLost
from flatpeak.workers.settings import adamw_of
from flatpeak.workers.state_source import StateSource
from flatpeak.workers.trainer import SlabRegion

_POLL_S = 0.25
_GONE_S = 10.0
_DRAINING_S = 5.0
_NODE_LABEL = "ray.io/node-id"
_SLAB_ALIGNMENT = 4096

log = logging.getLogger("flatpeak")


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


def reserve_workers(
    spec: Spec, device: str, *, token: str, nodes: Sequence[str] = (), patient: bool = False
) -> Iterator[PlacementGroup]:
    """One bundle a worker, on these `nodes` by rank if given. Yields the group again and again
    until it is placed.

    Raises ClusterError with the numbers when it can never be, or is not in time: at once when the
    cluster is too small, unless `patient`, since a node may come back.
    """
    bundle = {"CPU": float(spec.cluster.cpus_per_worker)} | (
        {"GPU": 1.0} if device == "cuda" else {}
    )
    needed = {name: amount * spec.cluster.workers for name, amount in bundle.items()}
    total = ray.cluster_resources()
    short = {name: total.get(name, 0) for name in needed if total.get(name, 0) < needed[name]}
    if short and not patient:
        raise ClusterError(
            f"{spec.cluster.workers} workers need {needed}, but the whole cluster has {short}; "
            "lower cluster.workers or cluster.cpus_per_worker, or add nodes"
        )
    group = placement_group(
        [bundle] * spec.cluster.workers,
        strategy=_strategy(spec, bundle),
        name=_group_name(spec.run, token),
        bundle_label_selector=[{_NODE_LABEL: node} for node in nodes]
        or [{} for _ in range(spec.cluster.workers)],
    )
    deadline = time.monotonic() + spec.cluster.start_timeout_s
    yield group
    while not group.wait(_POLL_S):
        yield group
        if time.monotonic() > deadline:
            state = placement_group_table(group).get("stats", {}).get("scheduling_state", "unknown")
            available = ray.available_resources()
            free = {name: available.get(name, 0.0) for name in bundle}
            raise ClusterError(
                f"{spec.cluster.workers} workers with {bundle} each were not placed within "
                f"cluster.start_timeout_s = {spec.cluster.start_timeout_s:g} s (Ray says {state}); "
                f"free in the whole cluster: {free}. Wait for other jobs to end, lower "
                "cluster.workers, or set cluster.address to local to start a Ray here"
            )


def _strategy(spec: Spec, bundle: Mapping[str, float]) -> str:
    """Workers as near to each other as there is room; but on two nodes where mirrors are wanted."""
    needed = {name: amount * spec.cluster.workers for name, amount in bundle.items()}
    alone = any(
        all(node["Resources"].get(name, 0.0) >= amount for name, amount in needed.items())
        for node in ray.nodes()
        if node["Alive"]
    )
    return "SPREAD" if spec.memory.optimizer.mirrors and alone else "PACK"


def release_group_of(run: str, token: str) -> None:
    """Takes back the placement group of a controller that died: Ray keeps it as long as the job."""
    try:
        group = ray.util.get_placement_group(_group_name(run, token))
    except ValueError:  # it had none, or gave it back
        return
    release(group, [])


def _group_name(run: str, token: str) -> str:
    return f"flatpeak-{run}-{token}"


def actor_class(kind: type) -> Any:
    """`kind` for Ray, with a thread for heartbeats beside the one of all other calls, which stay in
    order: collectives depend on that."""
    remote: Any = ray.remote
    return remote(concurrency_groups={HEARTBEAT: 1})(kind)


def start_workers(
    spec: Spec, group: PlacementGroup, device: str, *, logs: str, token: str, generation: int
) -> Iterator[Placed]:
    """The workers of a generation one by one; their nodes are not known yet."""
    actor = actor_class(TrainWorker)
    # A rank whose gloo listens on a public address would be open to the network for nothing.
    local = {"GLOO_SOCKET_IFNAME": "lo"} if spec.cluster.address == "local" else {}
    for rank in range(spec.cluster.workers):
        handle = actor.options(
            name=f"flatpeak-{spec.run}-{token}-{generation}-worker-{rank}",
            num_cpus=spec.cluster.cpus_per_worker,
            num_gpus=1 if device == "cuda" else 0,
            max_restarts=0,
            runtime_env={"env_vars": local},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=rank
            ),
        ).remote(spec, rank, device, logs, generation)
        yield Placed(f"worker {rank}", handle, node="")


def start_sources(
    spec: Spec, files: Sequence[ArenaFile]
) -> tuple[list[Placed], list[tuple[str, ...]]]:
    """An actor on each node that has some of the arenas `files`, which owns them, and the paths of
    its own."""
    nodes = sorted({file.node for file in files})
    folder = Path(spec.cluster.shm_dir)
    paths = [tuple(str(folder / f.name) for f in files if f.node == node) for node in nodes]
    actor, timeout = ray.remote(StateSource), spec.cluster.start_timeout_s
    sources = []
    for node, own in zip(nodes, paths, strict=True):
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        handle = actor.options(num_cpus=0, scheduling_strategy=here).remote(
            spec.run, own, adamw_of(spec), timeout_s=timeout
        )
        sources.append(Placed(f"the old arenas of node {node}", handle, node))
    return sources, paths


def suited_to(spec: Spec, workers: Counter[str], cores: Mapping[str, float]) -> Spec:
    """The job of a life after the first, on other nodes than those before.

    It has as many optimizer actors as its `workers` need, which may be on more nodes, and no more
    than there are `cores` for, of which a node that is lost had some; and no mirrors where all
    workers are on one node. Both are by node.
    """
    cluster, nodes = spec.cluster, len(workers)
    if nodes < 2:
        spec = mirrored(spec, 0)
    anywhere = cluster.optimizer_placement == "anywhere"
    least = 1 if anywhere else min(nodes, cluster.arenas)
    most = max(cluster.optimizers, least)
    for count in range(most, least - 1, -1):
        suited = sized(spec, count)
        try:
            _homes(suited.cluster, workers, cores)
        except ClusterError:
            continue
        return suited
    return sized(spec, most)  # whose placement tells what is missing


def optimizer_homes(spec: Spec, workers: Sequence[Placed]) -> list[str]:
    """The node of each optimizer actor, as `cluster.optimizer_placement` says."""
    return _homes(spec.cluster, by_node(workers), cores_of_nodes())


def by_node(workers: Sequence[Placed]) -> Counter[str]:
    """How many there are on each node."""
    return Counter(worker.node for worker in workers)


def cores_of_nodes() -> dict[str, float]:
    """All that each node has."""
    return {
        node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]
    }


def _homes(cluster: ClusterSpec, workers: Counter[str], cores: Mapping[str, float]) -> list[str]:
    place = homes_anywhere if cluster.optimizer_placement == "anywhere" else homes_beside
    return place(cluster, workers, cores)


def optimizer_homes_again(spec: Spec, left: Left) -> list[str]:
    """The same for a life that goes on with the arenas of another."""
    if spec.cluster.optimizer_placement == "anywhere":
        return [*left.arena_nodes]  # each actor owns the arena of its number
    nodes = sorted(set(left.worker_nodes))
    return [home_of(index, nodes) for index in range(spec.cluster.optimizers)]


def start_optimizers(
    spec: Spec, homes: Sequence[str], *, logs: str, token: str, generation: int
) -> Iterator[Placed]:
    """Optimizer actors one by one, each on its node."""
    for index, node in enumerate(homes):
        yield start_optimizer(spec, index, node, logs=logs, token=token, generation=generation)


def start_optimizer(
    spec: Spec, index: int, node: str, *, logs: str, token: str, generation: int
) -> Placed:
    """The optimizer actor `index`, also in the place of one that is dead."""
    handle = (
        actor_class(OptimizerActor)
        .options(
            name=f"flatpeak-{spec.run}-{token}-optimizer-{index}",
            num_cpus=spec.cluster.cpus_per_optimizer,
            num_gpus=0,
            max_restarts=0,  # a successor is told what to attach to and to finish
            max_task_retries=0,  # an update is not idempotent
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(spec, index, logs, generation)
    )
    return Placed(f"optimizer {index}", handle, node)


def arena_homes(spec: Spec, workers: Sequence[Placed], optimizers: Sequence[Placed]) -> list[str]:
    """The node of each arena, on which it stays whoever owns it: spread as its owners are."""
    if spec.cluster.optimizer_placement == "anywhere":
        return [actor.node for actor in optimizers]
    nodes = worker_nodes(workers)
    return [home_of(number, nodes) for number in range(spec.cluster.arenas)]


def home_of(index: int, nodes: Sequence[str]) -> str:
    """Of the optimizer actor of this index, or the arena of this number, in turn over `nodes`."""
    return nodes[index % len(nodes)]


def worker_nodes(workers: Sequence[Placed]) -> list[str]:
    """The nodes with workers. Optimizer actors beside them are on these in turn, by index."""
    return sorted({worker.node for worker in workers})


def living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def draining_nodes() -> set[str]:
    """Those that Ray was told to take out: by the autoscaler, or by `ray drain-node`."""
    client = _gcs_client(ray.get_runtime_context().gcs_address)
    return set(client.get_draining_nodes(timeout=_DRAINING_S))


@cache
def _gcs_client(address: str) -> Any:
    # Nothing public tells of draining nodes; Ray Serve asks in the same way.
    return ray._raylet.GcsClient(address=address)  # pyright: ignore


class NodeWatch:
    """Finds out that a node of the run is lost, or is to be, by a look at the cluster every
    `every_s`."""

    def __init__(
        self,
        *,
        alive: Callable[[], set[str]] = living_nodes,
        draining: Callable[[], set[str]] = draining_nodes,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alive, self._draining = alive, draining
        self._every_s, self._clock = every_s, clock
        self._next = self._next_notice = 0.0
        self._noticed: set[str] = set()

    def check(self, needed: Collection[str], *, now: bool = False) -> None:
        """Raises StateLost when one of the nodes is gone, at most `every_s` after Ray knows it;
        at once with `now`."""
        if not needed or (self._clock() < self._next and not now):
            return
        self._next = self._clock() + self._every_s
        if gone := sorted(set(needed) - self._alive()):
            raise StateLost(
                f"node {', '.join(gone)} is gone, with the optimizer state in its memory"
            )

    def notices(self, needed: Collection[str]) -> set[str]:
        """Of these nodes those that are to go soon, as a spot instance's are."""
        if self._clock() >= self._next_notice:
            self._next_notice = self._clock() + self._every_s
            try:
                self._noticed = self._draining() & set(needed)
            except RayError as error:  # it is asked again; only snapshots hang on the answer
                log.warning("Ray does not say which nodes are to go: %s", error)
        return self._noticed


def living_runs() -> list[str]:
    """At least those whose controller lives in this cluster: beside them names of other actors."""
    prefix = "flatpeak-"
    names = ray.util.list_named_actors()
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def free_cpus() -> dict[str, float]:
    """Of each node, as far as Ray knows now."""
    return {node: free.get("CPU", 0.0) for node, free in free_resources().items()}


def free_resources() -> dict[str, dict[str, float]]:
    """Of each node that is to stay, as far as Ray knows now."""
    try:
        going = draining_nodes()
    except RayError as error:
        log.warning("Ray does not say which nodes are to go: %s", error)
        going = set()
    # For developers, says Ray, but nothing public tells nodes apart.
    free = available_resources_per_node()
    return {node: has for node, has in free.items() if node not in going}


def homes_beside(
    cluster: ClusterSpec, workers: Counter[str], cores: Mapping[str, float]
) -> list[str]:
    """The node of each optimizer actor, spread in turn over the nodes that hold workers.

    `workers` are counted by node, `cores` are all that a node has. A worker reaches its buckets
    through shared memory, so every such node needs an actor.
    """
    nodes = sorted(workers)
    if cluster.optimizers < len(nodes):
        raise ClusterError(
            f"the workers live on {len(nodes)} nodes, so cluster.optimizers must be at least "
            f"{len(nodes)}, not {cluster.optimizers}; or set cluster.optimizer_placement to "
            "anywhere"
        )
    homes = [home_of(index, nodes) for index in range(cluster.optimizers)]
    for node, count in Counter(homes).items():
        _check_cores(cluster, node, workers[node], count, cores.get(node, 0.0))
    return homes


def _check_cores(
    cluster: ClusterSpec, node: str, workers: int, optimizers: int, cores: float
) -> None:
    """An actor bound to a node without the cores for it would pend without a word."""
    needed = workers * cluster.cpus_per_worker + optimizers * cluster.cpus_per_optimizer
    if needed > cores:
        raise ClusterError(
            f"{workers} workers x {cluster.cpus_per_worker} and {optimizers} optimizer actors "
            f"x {cluster.cpus_per_optimizer} need {needed} cores on node {node}, which has "
            f"{cores:g}; lower cluster.cpus_per_worker or cluster.cpus_per_optimizer"
        )


def homes_anywhere(
    cluster: ClusterSpec, workers: Counter[str], cores: Mapping[str, float]
) -> list[str]:
    """The node of each optimizer actor, spread in turn over all that have cores for one, those
    without workers first."""
    per_actor = cluster.cpus_per_optimizer
    room = {
        node: int(count - workers[node] * cluster.cpus_per_worker) // per_actor
        for node, count in cores.items()
    }
    homes: list[str] = []
    for index in range(cluster.optimizers):
        held = Counter(homes)
        free = [node for node in room if held[node] < room[node]]
        if not free:
            raise ClusterError(
                f"{cluster.optimizers} optimizer actors x {per_actor} cores beside "
                f"{workers.total()} workers x {cluster.cpus_per_worker} do not fit the cluster, "
                f"which has room for {index}; lower cluster.optimizers, "
                "cluster.cpus_per_optimizer or cluster.cpus_per_worker, or add nodes"
            )
        homes.append(min(free, key=lambda node: (held[node], node in workers, node)))
    return homes


def arenas_beside(worker: Placed, homes: Sequence[str]) -> list[int]:
    """The arenas, of which `homes` are the nodes, that share the worker's memory, by number."""
    return [number for number, node in enumerate(homes) if node == worker.node]


def arenas_for(spec: Spec, worker: Placed, homes: Sequence[str]) -> list[int]:
    """The arenas that may hold the worker's buckets, by number."""
    if spec.cluster.optimizer_placement == "anywhere":
        return list(range(len(homes)))
    return arenas_beside(worker, homes)


def remote_ranks(
    buckets: Sequence[Bucket], workers: Sequence[Placed], homes: Sequence[str]
) -> dict[int, list[int]]:
    """By arena the ranks that have buckets in it and do not share its memory."""
    found: dict[int, set[int]] = {}
    for bucket in buckets:
        if workers[bucket.rank].node != homes[bucket.arena]:
            found.setdefault(bucket.arena, set()).add(bucket.rank)
    return {arena: sorted(ranks) for arena, ranks in sorted(found.items())}


def slab_regions(
    sizes: Sequence[int], workers: Sequence[Placed], homes: Sequence[str]
) -> list[SlabRegion]:
    """Each rank's boundaries live in the first arena of its node, in order of rank, on pages; or
    with the rank itself where there is none."""
    used = dict.fromkeys(range(len(homes)), 0)
    regions = []
    for worker, nbytes in zip(workers, sizes, strict=True):
        arena = next(iter(arenas_beside(worker, homes)), None)
        if arena is None:
            regions.append(SlabRegion(arena=None, offset=0, nbytes=nbytes))
            continue
        regions.append(SlabRegion(arena=arena, offset=used[arena], nbytes=nbytes))
        used[arena] += -(-nbytes // _SLAB_ALIGNMENT) * _SLAB_ALIGNMENT
    return regions


def release(group: PlacementGroup | None, actors: Sequence[Any]) -> None:
    """Ends the actors, then their placement group; returns when Ray has taken it back."""
    for actor in actors:
        ray.kill(actor)
    if group is None:
        return
    remove_placement_group(group)
    deadline = time.monotonic() + _GONE_S
    while placement_group_table(group).get("state") != "REMOVED":
        if time.monotonic() > deadline:
            log.warning("the placement group is still there after %g s", _GONE_S)
            return
        time.sleep(0.05)


def sweep_nodes(spec: Spec, nodes: Iterable[str], tokens: Collection[str]) -> None:
    """Removes what the run's killed processes left in the memory of these nodes, by the `tokens` of
    their lives."""
    remove, alive = ray.remote(remove_arenas), living_nodes()
    refs = [
        remove.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(spec.cluster.shm_dir, spec.run, token)
        for node in nodes
        if node in alive
        for token in tokens
    ]
    try:
        ray.get(refs, timeout=3 * _GONE_S)
    except RayError as error:  # a node is gone, and its memory with it
        log.warning("arenas of this run may be left until the next one starts: %s", error)
