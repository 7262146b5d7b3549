"""The processes of a run as Ray actors: thin shells around the trainer and the optimizer core.

The controller calls every worker's methods in the same order, so each call that is collective over
the world meets its peers.
"""

import faulthandler
import logging
import os
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flatpeak.kernels.adamw import LEAST_COMPILED
from flatpeak.workers import progress
from flatpeak.workers.arena import Arena, sweep_stale
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.buckets import Bucket, Range, Shard
from flatpeak.workers.errors import ClusterError, SnapshotFailed
from flatpeak.workers.host_memory import Room, node_path, room
from flatpeak.workers.metrics import NODE, MetricsServer, ProcessMetrics, Serving
from flatpeak.workers.metrics.roles import OptimizerMetrics, WorkerMetrics
from flatpeak.workers.mirror import MirrorPort, Route, Sent
from flatpeak.workers.optimizer import OptimizerCore
from flatpeak.workers.remote import ArenaServer, RemoteArena, open_store
from flatpeak.workers.settings import adamw_of
from flatpeak.workers.snapshot import SnapshotPart, SnapshotReader, restore, write_snapshot_part
from flatpeak.workers.state_source import Arrays, Held, StateReader, StateSource
from flatpeak.workers.trainer import SlabRegion, StepResult, Trainer
from flatpeak.workers.update_rates import measure_device_rates, measure_host_rate
from flatpeak.workers.update_report import UpdateReport, UpdateReports
from flatpeak.workers.update_split import DeviceRates
from flatpeak.workers.weights import open_weights

if TYPE_CHECKING:
    from flatpeak.controller.host_plan import PlannedArena
    from flatpeak.controller.spec import Spec

log = logging.getLogger("flatpeak")


def log_to(folder: str, name: str) -> None:
    """Sends this process's log to a file of the run folder, tracebacks of crashes too."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    stream = (path / f"{name}.log").open("a")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    faulthandler.enable(stream)


def node_of_this_process() -> str:
    return ray.get_runtime_context().get_node_id()


def _host(spec: "Spec") -> str:
    """The address at which this node's processes listen."""
    return "127.0.0.1" if spec.cluster.address == "local" else ray.util.get_node_ip_address()


def _sweep(spec: "Spec", living: Collection[str]) -> None:
    """Removes what dead runs left, before any arena of this run is in the making.

    Not of the runs that are `living`: after a death there may be a moment when nobody holds theirs.
    """
    for path in sweep_stale(node_path(spec.cluster.shm_dir), keep_runs=living):
        log.info("removed %s, which a dead run had left", path)


def at_this_node(serving: Serving) -> Serving:
    """With the node's own address, where that is asked for."""
    if serving.host != NODE:
        return serving
    return replace(serving, host=ray.util.get_node_ip_address())


HEARTBEAT = "heartbeat"
"""The concurrency group of `heartbeat`, to be made with the actor: one thread. All other calls then
stay in order on another one, as collectives need it."""


class _Process:
    """A process with metrics and a heartbeat."""

    _metrics: ProcessMetrics
    _exporter: MetricsServer | None = None

    def serve_metrics(self, serving: Serving) -> tuple[str, dict[str, str]]:
        """Begins to serve; returns the address and the process's labels."""
        pages = {"/health": lambda: self._metrics.labels}
        self._exporter = MetricsServer(at_this_node(serving), self._metrics.registry, pages=pages)
        return self._exporter.address, self._metrics.labels

    @ray.method(concurrency_group=HEARTBEAT)
    def heartbeat(self) -> progress.Beat:
        """What the process does now: the answer comes while it works on another call."""
        return progress.beat()


class TrainWorker(_Process):
    """One rank: a `Trainer` and its place in the process group of its generation."""

    def __init__(
        self, spec: "Spec", rank: int, device: str, logs: str, generation: int = 0
    ) -> None:
        log_to(logs, f"worker-{rank}")
        log.info("rank %d on %s, generation %d, pid %d", rank, device, generation, os.getpid())
        torch.set_num_threads(spec.cluster.cpus_per_worker)
        self._spec, self._rank = spec, rank
        # Ray shows a worker its own GPU alone.
        self._device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(self._device)
        self._trainer = Trainer(spec, rank=rank, device=self._device)
        self._metrics: WorkerMetrics = WorkerMetrics(spec, rank, generation)
        self._store: TCPStore | None = None

    def node(self) -> str:
        return node_of_this_process()

    def sweep(self, living: Collection[str]) -> None:
        """As optimizer actors do; this node may have none."""
        _sweep(self._spec, living)

    def open_rendezvous(self) -> tuple[str, int]:
        """Opens the store at which the ranks meet; rank 0 alone. Returns its address."""
        cluster, host = self._spec.cluster, _host(self._spec)
        try:
            self._store = open_store(
                host,
                cluster.rendezvous_port,
                world=cluster.workers,
                timeout_s=cluster.start_timeout_s,
            )
        except OSError as error:
            raise ClusterError(
                f"cluster.rendezvous_port = {cluster.rendezvous_port} cannot be had on {host}: "
                f"{error.strerror}; 0 takes any free port"
            ) from None
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        cluster = self._spec.cluster
        store = self._store or TCPStore(
            host, port, cluster.workers, timeout=timedelta(seconds=cluster.start_timeout_s)
        )
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=self._rank,
            world_size=cluster.workers,
            timeout=timedelta(seconds=cluster.peer_timeout_s),
        )

    def build(self) -> tuple[Shard, ...]:
        shards = self._trainer.build()
        log.info("built %d parameters' shards", len(shards))
        return shards

    def slab_bytes(self) -> int:
        return self._trainer.slab_bytes()

    def update_rates(self) -> DeviceRates:
        """Of this rank's device and link, while all ranks measure theirs."""
        return measure_device_rates(self._device)

    def attach(
        self,
        buckets: tuple[Bucket, ...],
        arenas: dict[int, str],
        slab: SlabRegion,
        servers: dict[int, tuple[str, int]],
    ) -> None:
        """`arenas` (number to path) are on this node; `servers` (number to address) have buckets of
        this rank on others, each at the actor of that number."""
        remote = {
            number: RemoteArena.connect(
                address,
                actor=number,
                rank=self._rank,
                host=_host(self._spec),
                timeout_s=self._spec.cluster.start_timeout_s,
                pinned=self._device.type == "cuda",
            )
            for number, address in servers.items()
        }
        paths = {number: str(node_path(path)) for number, path in arenas.items()}
        self._trainer.attach(buckets, paths, slab, remote=remote)

    def step(self, step: int) -> StepResult:
        try:
            result = self._trainer.step(step)
        except Exception:
            log.exception("step %d failed", step)
            raise
        log.info("step %d: %.3f s, peaks %s", step, result.seconds, result.peaks)
        self._metrics.observe(result)
        return result

    def update(self, step: int, lr: float, clip_factor: float | None) -> None:
        """Begins to update what this worker updates; what it raises, the next step raises."""
        self._trainer.update(step, lr=lr, clip_factor=clip_factor)

    def finish_update(self) -> None:
        """Returns when that has ended; raises what it raised."""
        self._trainer.finish_update()


@dataclass(frozen=True)
class Sources:
    """Actors of `StateSource`, one a node that has arenas at `paths`, and what each has."""

    handles: tuple[Any, ...]
    nodes: tuple[str, ...]
    paths: tuple[tuple[str, ...], ...]
    held: tuple[Held, ...]


class OptimizerActor(_Process):
    """Owner of arenas: fills them, updates them, writes them to disk, removes them."""

    def __init__(self, spec: "Spec", index: int, logs: str, generation: int = 0) -> None:
        log_to(logs, f"optimizer-{index}")
        log.info("optimizer %d, pid %d", index, os.getpid())
        torch.set_num_threads(spec.cluster.cpus_per_optimizer)
        self._spec, self._index = spec, index
        mirrors = spec.cluster.arenas if spec.memory.optimizer.mirrors else None
        self._owner = ArenaOwner(spec.run, adamw_of(spec), mirrors_from=mirrors)
        timeout_s = spec.cluster.start_timeout_s
        self._mirrors = MirrorPort(self._owner, index, host=_host(spec), timeout_s=timeout_s)
        self._server: ArenaServer | None = None
        self._reports = UpdateReports()
        self._metrics: OptimizerMetrics = OptimizerMetrics(spec, index, generation)

    def sweep(self, living: Collection[str]) -> None:
        """As workers do; this node may have none."""
        _sweep(self._spec, living)

    def create(
        self,
        planned: "dict[int, PlannedArena]",
        paths: dict[int, str],
        origin: Path | Sources | None,
    ) -> None:
        """Makes the arenas at `paths` and fills them from a snapshot or other arenas, or else
        afresh."""
        spec = self._spec
        for number, plan in planned.items():
            self._owner.create(
                number,
                node_path(paths[number]),
                buckets=plan.buckets,
                spare_frames=spec.memory.optimizer.slots,
                slab_bytes=plan.slab_bytes,
            )
        for core in self._owner.cores:
            if core.buckets:
                self._fill(core, origin)
        for arena in self._owner.arenas.values():
            log.info("arena %s: %d buckets, %d bytes", arena.path, len(arena.buckets), arena.nbytes)

    def _fill(self, core: OptimizerCore, origin: Path | Sources | None) -> None:
        if isinstance(origin, Sources):
            self._move(core, origin)
        elif origin is not None:
            with SnapshotReader(origin) as reader:
                restore(core, reader)
        else:
            weights = open_weights(self._spec)
            for bucket in core.buckets:
                for held in bucket.ranges:
                    core.load(held, weights.read(held))
            core.commit_load(0)

    def _move(self, core: OptimizerCore, origin: Sources) -> None:
        timeout = self._spec.cluster.start_timeout_s
        own = [n for n, node in enumerate(origin.nodes) if node == node_of_this_process()]
        here = {
            number: StateSource(
                self._spec.run,
                origin.paths[number],
                core.settings,
                timeout_s=None,
            )
            for number in own
        }

        def fetch(number: int, held: Range) -> Arrays:
            if number in here:
                return here[number].read(held)
            return ray.get(origin.handles[number].read.remote(held), timeout=timeout)

        restore(core, StateReader(origin.held, fetch))
        for source in here.values():
            source.close()

    def serve(self, ranks: list[int]) -> tuple[str, int]:
        """Lets workers of other nodes reach the one arena; returns the address for them."""
        cluster = self._spec.cluster
        (arena,) = self._owner.core.arenas
        self._server = ArenaServer(
            arena, ranks, host=_host(self._spec), timeout_s=cluster.start_timeout_s
        )
        log.info("serving workers %s at %s:%d", ranks, *self._server.address)
        return self._server.address

    def ready(self) -> None:
        """Returns when this process would update at once: what it takes is imported and loaded."""
        measure_host_rate(elements=LEAST_COMPILED)

    def attach(self, paths: dict[int, str]) -> float:
        """Takes over arenas (number to path): handed over, or of a dead predecessor in the middle
        of whatever it did. Returns the seconds that it took."""
        began = time.perf_counter()
        found = {number: node_path(path) for number, path in paths.items()}
        self._owner.attach(found, timeout_s=self._spec.cluster.start_timeout_s)
        versions = Counter(core.version(b) for core in self._owner.cores for b in core.buckets)
        log.info("took over arenas %s; buckets by step: %s", [*paths], dict(versions))
        return time.perf_counter() - began

    def buckets(self) -> list[Bucket]:
        """Those of its arenas."""
        return self._owner.core.buckets

    def versions(self) -> list[int]:
        """That its buckets have, also those of mirrors."""
        return sorted({core.version(b) for core in self._owner.cores for b in core.buckets})

    def release(self, numbers: list[int]) -> None:
        """Gives up these arenas, after all that it was asked to do with them."""
        self._mirrors.close()
        self._owner.release(numbers)
        log.info("released arenas %s", numbers)

    def host_room(self) -> Room:
        """What this node has left for arenas."""
        return room(node_path(self._spec.cluster.shm_dir))

    def update_rate(self) -> float:
        """Parameters a second, while all actors measure theirs."""
        return measure_host_rate()

    def update(self, step: int, lr: float, clip_factor: float | None) -> UpdateReport:
        """Returns when `step` is committed: also by the workers that update buckets themselves."""
        progress.begin(step)
        self._owner.forget()
        for core in self._owner.cores:
            core.update(step, lr=lr, clip_factor=clip_factor)
        return self._committed(step)

    def finish(self, step: int, lr: float, clip_factor: float | None) -> UpdateReport:
        """`update` of the step that was asked of a dead predecessor, whatever it did of it."""
        progress.begin(step)
        for core in self._owner.cores:
            core.finish(step, lr=lr, clip_factor=clip_factor)
        return self._committed(step)

    def _committed(self, step: int) -> UpdateReport:
        core = self._owner.core
        # Longer than the controller waits for the step, which then looks for the one that hangs.
        core.wait_for_workers(step, timeout_s=self._spec.cluster.peer_timeout_s)
        self._metrics.observe(core, mirrors=self._owner.mirrors.arenas)
        progress.enter(progress.IDLE)
        return self._reports.next(core.counters)

    def serve_mirrors(self, senders: list[int]) -> tuple[str, int]:
        """Lets these optimizer actors write to its mirrors; returns the address for them."""
        return self._mirrors.serve(senders)

    def link_mirrors(self, routes: list[Route]) -> str | None:
        """Connects to the mirrors of its arenas; the reason if that failed."""
        return self._mirrors.link(routes)

    def mirror(self, step: int) -> Sent:
        """Returns when the mirrors of its arenas have the gradients of `step`, or why they have
        not: that is no failure of this process."""
        return self._mirrors.send(step)

    def snapshot(self, folder: str, step: int) -> list[SnapshotPart | SnapshotFailed]:
        """Writes each arena that it owns, or says why not: the run goes on without. No mirrors."""
        return [
            _part(folder, arena, number, step) for number, arena in self._owner.originals.items()
        ]

    def close(self, paths: list[str]) -> None:
        """Removes these names of arenas; their memory goes with the last process that maps them."""
        for path in paths:
            node_path(path).unlink(missing_ok=True)


def _part(folder: str, arena: Arena, number: int, step: int) -> SnapshotPart | SnapshotFailed:
    # An answer like another: the controller waits for those of all, and ends no run for it.
    try:
        return write_snapshot_part(folder, arena, number, step)
    except SnapshotFailed as error:
        log.warning("%s", error)
        return error
