"""The single controller of a run: places its processes and drives them step by step.

A step: every worker runs forward and backward and leaves its gradients in the arenas; the one
global norm gives the clipping factor; the optimizer actors update their buckets while the workers
already begin the next step and wait there for the weights they need. The step is committed when the
last bucket has its new version.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from flatpeak.controller.placement import (
    Placed,
    pick_device,
    release,
    reserve_workers,
    start_optimizers,
    start_workers,
)
from flatpeak.controller.runs import Event, RunEvent, StepRecord
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec
from flatpeak.controller.waiting import Interrupted, collect
from flatpeak.workers.buckets import Bucket, cut_buckets
from flatpeak.workers.data import sample_ids
from flatpeak.workers.optimizer import clipping_factor
from flatpeak.workers.snapshot import (
    SnapshotReader,
    commit_manifest,
    find_latest,
    keep_last,
    snapshot_folder,
)
from flatpeak.workers.trainer import SlabRegion, StepResult

_GRACE_S = 60.0


def event(kind: str, **detail: Any) -> RunEvent:
    return RunEvent(kind=kind, time=time.time(), detail=detail)


class Controller:
    """A Ray actor with two threads: one runs the training, the other hears `stop`.

    `folder` is the run folder; the spec's degrees are resolved.
    """

    def __init__(self, spec: Spec, folder: str) -> None:
        self.spec, self.folder = spec, Path(folder)
        self._stop = threading.Event()
        self._group: Any = None
        self._workers: list[Placed] = []
        self._optimizers: list[Placed] = []
        self._updates: dict[str, Any] = {}
        self._updating = 0  # the step that `_updates` apply
        self._committed = 0
        self._saved = 0
        self._snapshot: tuple[int, dict[str, Any]] | None = None

    def stop(self) -> None:
        """Ends the run at once; what is committed is kept as `snapshots.at_end` says."""
        self._stop.set()

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> Iterator[Event]:
        """Trains to the last step; yields what happens as it happens."""
        try:
            try:
                yield from self._start()
                yield from self._train()
            except Interrupted:
                yield event("interrupted")
            yield from self._finish()
        finally:
            self._teardown()

    # Start

    def _start(self) -> Iterator[Event]:
        spec, logs = self.spec, str(self.folder / "logs")
        device = pick_device(spec)
        self._group = reserve_workers(spec, device)
        handles = start_workers(spec, self._group, device, logs)
        self._workers = [
            Placed(f"worker {rank}", handle, node="") for rank, handle in enumerate(handles)
        ]
        nodes = self._ask(self._workers, "start of the workers", "node")
        self._workers = [Placed(w.name, w.handle, nodes[w.name]) for w in self._workers]
        yield event("workers_placed", device=device, nodes=sorted(set(nodes.values())))

        host, port = self._ask(self._workers[:1], "rendezvous", "open_rendezvous")["worker 0"]
        self._ask(self._workers, "forming the process group", "join", host, port)
        shards = self._ask(self._workers, "building the model", "build")
        slabs = self._ask(self._workers, "sizing the boundaries", "slab_bytes")

        distinct = sorted(set(nodes.values()))
        self._optimizers = start_optimizers(spec, distinct, logs)
        buckets = cut_buckets(
            [shard for worker in self._workers for shard in shards[worker.name]],
            bucket_parameters=spec.memory.optimizer.bucket_parameters,
            actors_of_rank=self._actors_beside,
        )
        regions = self._slab_regions([slabs[worker.name] for worker in self._workers])
        yield from self._fill_arenas(buckets, regions)
        parameters = sum(bucket.size for bucket in buckets)
        yield event("started", parameters=parameters, buckets=len(buckets), step=self._committed)

    def _actors_beside(self, rank: int) -> list[int]:
        node = self._workers[rank].node
        return [index for index, actor in enumerate(self._optimizers) if actor.node == node]

    def _slab_regions(self, sizes: list[int]) -> list[SlabRegion]:
        """Each rank's boundaries live with the first actor of its node, in order of rank."""
        used = dict.fromkeys(range(len(self._optimizers)), 0)
        regions = []
        for rank, nbytes in enumerate(sizes):
            actor = self._actors_beside(rank)[0]
            regions.append(SlabRegion(actor=actor, offset=used[actor], nbytes=nbytes))
            used[actor] += nbytes
        return regions

    def _fill_arenas(
        self, buckets: tuple[Bucket, ...], regions: list[SlabRegion]
    ) -> Iterator[Event]:
        snapshot = self._snapshot_to_resume()
        if snapshot is not None:
            with SnapshotReader(snapshot) as reader:
                self._committed = self._updating = self._saved = reader.step
            yield event("resumed", snapshot=str(snapshot), step=self._committed)
        refs = {}
        for index, actor in enumerate(self._optimizers):
            own = tuple(bucket for bucket in buckets if bucket.actor == index)
            slab = sum(region.nbytes for region in regions if region.actor == index)
            refs[actor.name] = actor.handle.create.remote(own, slab, snapshot)
        paths = self._collect(refs, "filling the arenas", self.spec.cluster.start_timeout_s)
        arenas = {index: paths[actor.name] for index, actor in enumerate(self._optimizers)}
        attach = {
            worker.name: worker.handle.attach.remote(buckets, arenas, regions[rank])
            for rank, worker in enumerate(self._workers)
        }
        self._collect(attach, "attaching to the arenas", self.spec.cluster.start_timeout_s)

    def _snapshot_to_resume(self) -> Path | None:
        return find_latest(self.folder) if self.spec.resume else None

    # Train

    def _train(self) -> Iterator[Event]:
        results: list[StepResult] = []
        for step in range(self._committed + 1, self.spec.train.steps + 1):
            began = time.perf_counter()
            refs = {w.name: w.handle.step.remote(step) for w in self._workers}
            # The optimizer actors are watched too: without them the workers wait in vain.
            answers = self._collect(
                refs | self._updates, f"step {step}", self.spec.cluster.step_timeout_s
            )
            self._committed = self._updating
            yield from self._commit_snapshot()
            results = [answers[worker.name] for worker in self._workers]
            rate = lr(step, train=self.spec.train)
            self._updates, self._updating = self._update(results[0], rate), step
            yield self._record(results, rate, time.perf_counter() - began)
            every = self.spec.snapshots.every_steps
            if every and step % every == 0:
                self._begin_snapshot(step)
        if results:
            yield event("largest_tensors", shapes=results[0].largest)

    def _update(self, result: StepResult, rate: float) -> dict[str, Any]:
        factor = None
        if result.usable:
            factor = clipping_factor(result.grad_norm, self.spec.train.max_grad_norm)
        return {
            actor.name: actor.handle.update.remote(result.step, rate, factor)
            for actor in self._optimizers
        }

    def _record(self, results: list[StepResult], rate: float, seconds: float) -> StepRecord:
        first = results[0]
        ids = sample_ids(first.step - 1, self.spec.train.sequences_per_step)
        budget = self.spec.memory.device_budget_bytes
        return StepRecord(
            step=first.step,
            loss=first.loss,
            grad_norm=first.grad_norm,
            lr=rate,
            tokens=first.tokens,
            tokens_per_s=first.tokens / seconds,
            step_seconds=seconds,
            peak_bytes=_largest_of([result.peaks for result in results]),
            budget_bytes=None if budget == "auto" else budget,
            skipped=not first.usable,
            first_sample=ids[0],
            last_sample=ids[-1],
        )

    # Snapshots

    def _begin_snapshot(self, step: int) -> None:
        # An actor runs its calls in order: after the update of `step`, before the next one.
        folder = str(snapshot_folder(self.folder, step))
        refs = {a.name: a.handle.snapshot.remote(folder, step) for a in self._optimizers}
        self._snapshot = (step, refs)

    def _commit_snapshot(self) -> Iterator[Event]:
        if self._snapshot is None:
            return
        (step, refs), self._snapshot = self._snapshot, None
        timeout = self.spec.cluster.step_timeout_s
        parts = collect(refs, what=f"snapshot of step {step}", timeout_s=timeout)
        folder = snapshot_folder(self.folder, step)
        meta = {"run": self.spec.run, "train": self.spec.train.model_dump()}
        commit_manifest(folder, step=step, parts=list(parts.values()), meta=meta)
        keep_last(self.folder, self.spec.snapshots.keep)
        self._saved = step
        yield event("snapshot", step=step, folder=str(folder))

    # End

    def _finish(self) -> Iterator[Event]:
        """Waits for the updates under way and keeps what is committed.

        Workers hold no state, so an interrupted run need not wait for the step they are in.
        """
        collect(self._updates, what="the last update", timeout_s=_GRACE_S)
        self._committed = self._updating
        yield from self._commit_snapshot()
        if self.spec.snapshots.at_end and self._committed > self._saved:
            self._begin_snapshot(self._committed)
            yield from self._commit_snapshot()
        yield event("finished", step=self._committed)

    def _teardown(self) -> None:
        for actor in self._optimizers:
            try:
                ray.get(actor.handle.close.remote(), timeout=_GRACE_S)
            except RayError:
                continue  # it is dead already; the driver sweeps the arena it left
        release(self._group, [placed.handle for placed in self._workers + self._optimizers])

    def _ask(self, actors: list[Placed], what: str, method: str, *args: Any) -> dict[str, Any]:
        refs = {placed.name: getattr(placed.handle, method).remote(*args) for placed in actors}
        return self._collect(refs, what, self.spec.cluster.start_timeout_s)

    def _collect(self, refs: dict[str, Any], what: str, timeout_s: float) -> dict[str, Any]:
        return collect(refs, what=what, timeout_s=timeout_s, interrupted=self._stop.is_set)


def _largest_of(peaks: list[dict[str, int]]) -> dict[str, int]:
    """The worst rank of every component."""
    names = sorted({name for rank in peaks for name in rank})
    return {name: max(rank.get(name, 0) for rank in peaks) for name in names}
