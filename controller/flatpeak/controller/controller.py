"""The single controller of a run: places its processes and drives them step by step.

A step: every worker runs forward and backward and leaves its gradients in the arenas; the one
global norm gives the clipping factor; the optimizer actors update their buckets while the workers
already begin the next step and wait there for the weights they need. The step is committed when the
last bucket has its new version. A process that dies is replaced on the way: an optimizer actor
alone, a worker with all its peers, which then do the step again. Between two steps there may become
more or fewer optimizer actors.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from flatpeak.controller.arena_set import ArenaSet
from flatpeak.controller.autoscaler import AUTO, Autoscaler
from flatpeak.controller.display import count
from flatpeak.controller.exporters import Exporters
from flatpeak.controller.heartbeats import Heartbeats
from flatpeak.controller.host_plan import check_host_bytes, first_of_nodes, planned_host_bytes
from flatpeak.controller.lives import REPLACED, STARTED, Life, sized
from flatpeak.controller.metrics import RunMetrics
from flatpeak.controller.mirrors import NOTHING_MIRRORED, Mirrored, check_nodes
from flatpeak.controller.old_arenas import OldArenas
from flatpeak.controller.optimizer_team import OptimizerTeam, Update
from flatpeak.controller.ownership import Ownership, assign_arenas
from flatpeak.controller.placement import (
    NodeWatch,
    Placed,
    arena_homes,
    arenas_beside,
    arenas_for,
    by_node,
    cores_of_nodes,
    free_cpus,
    living_nodes,
    living_runs,
    optimizer_homes,
    optimizer_homes_again,
    pick_device,
    release,
    remote_ranks,
    reserve_workers,
    slab_regions,
    start_optimizer,
    start_optimizers,
    start_workers,
    suited_to,
    sweep_nodes,
    worker_nodes,
)
from flatpeak.controller.regrouping import (
    LEAVING,
    Regroup,
    Regrouping,
    refusal,
    too_little_room,
)
from flatpeak.controller.resume import check_parameters, parameter_sizes
from flatpeak.controller.runs import Event, RunEvent, RunFolder, event
from flatpeak.controller.scale_requests import DONE, REFUSED
from flatpeak.controller.scaling import Capacity, Change, Refused, Scaling, handed_over
from flatpeak.controller.schedule import lr
from flatpeak.controller.snapshots import Snapshots
from flatpeak.controller.spec import Spec
from flatpeak.controller.step_results import check_budget, larger_shapes, step_record
from flatpeak.controller.takeover import update_under_way
from flatpeak.controller.update_division import divide_updates
from flatpeak.controller.waiting import Died, Interrupted, Watch, collect, listed
from flatpeak.controller.worker_group import UPDATE_ON, WorkerGroup, parts_of
from flatpeak.workers.actors import Sources, log_to
from flatpeak.workers.buckets import Bucket, cut_buckets
from flatpeak.workers.errors import ProcessLost, RunFailed, StateLost, WaitTimeout
from flatpeak.workers.metrics import Serving
from flatpeak.workers.optimizer import clipping_factor
from flatpeak.workers.snapshot import SnapshotReader
from flatpeak.workers.trainer import SlabRegion, StepResult
from flatpeak.workers.update_report import UpdateReport

_GRACE_S = 60.0
_CLOSE_S = 5.0
_ABOUT_TO_CHANGE = "the workers are about to change; ask again when they have"

log = logging.getLogger("flatpeak")


class Controller:
    """A Ray actor with two threads: one runs the training, the other hears `stop` and `scale`.

    `folder` is the run folder, `life` what it begins from, checked by the driver.
    """

    def __init__(self, life: Life, folder: str, serving: Serving | None) -> None:
        spec = self.spec = life.spec
        self.folder, self._life = Path(folder), life
        self._records = RunFolder(self.folder)
        self._metrics = RunMetrics(spec)
        log_to(str(self.folder / "logs"), "controller")
        log.info("controller, pid %d", os.getpid())
        self._stop = threading.Event()
        self._group: Any = None
        self._device = ""
        self._crew = WorkerGroup(
            start=self._start_workers,
            ask=self._ask,
            generation=life.generation,
            nodes=life.left.worker_nodes if life.left else (),
        )
        self._workers = self._crew.workers
        self._optimizers: list[Placed] = []
        self._exporters = Exporters(
            self._metrics,
            serving,
            workers=self._workers,
            optimizers=self._optimizers,
            ask=self._ask,
        )
        self._watch = NodeWatch()
        self._nodes: set[str] = set()  # without which the run cannot go on
        self._going: set[str] = set()  # of these, those that are to go soon
        self._arenas = ArenaSet(spec, (life.left or life).token)
        self._filled = False  # whether the actors were told to make them
        self._team = OptimizerTeam(
            self._optimizers,
            successor=self._start_successor,
            arena_path=lambda number: self._arenas.path(number),
            collect=self._collect,
            start_timeout_s=spec.cluster.start_timeout_s,
        )
        self._team.others = lambda: self._crew.mortal
        self._heartbeats = self._heartbeats_of(lambda: [*self._workers, *self._optimizers])
        self._optimizer_heartbeats = self._heartbeats_of(lambda: self._optimizers)
        self._team.watch = self._optimizer_heartbeats
        self._snapshots = Snapshots(spec, self.folder, self._team, watch=self._optimizer_heartbeats)
        self._scaling = Scaling(
            self._optimizers,
            capacity=self._capacity,
            start=self._start_optimizer,
            timeout_s=spec.cluster.start_timeout_s,
        )
        self._autoscaler = Autoscaler(
            spec.cluster.autoscale,
            self._optimizers,
            scaling=self._scaling,
            arenas=lambda: self._arenas.held_by(self._team.ownership.owners),
        )
        self._regrouping = Regrouping()
        self._makes_way = False
        self._keeps_arenas = False  # for the next life
        self._moved = OldArenas(spec, life.moved, ask=self._ask)
        self._started = False
        self._committed = 0
        self._on_device = False  # whether workers update buckets
        self._unstoppable = False  # while the run ends, and while arenas change hands
        self._results: dict[str, StepResult] = {}
        self._reports: dict[str, UpdateReport] = {}  # of the optimizer actors

    def stop(self) -> None:
        """Ends the run at once; what is committed is kept as `snapshots.at_end` says."""
        self._stop.set()

    def scale(self, request: str, optimizers: int) -> str | None:
        """Asks for so many optimizer actors, which an event with `request` will tell the end of;
        the reason where that is refused."""
        if self._regrouping.due() is not None:
            return _ABOUT_TO_CHANGE
        return self._scaling.ask(request, optimizers)

    def regroup(self, request: str, spec: Spec) -> str | None:
        """Asks for the processes of `spec`, for which this controller makes way after a step; the
        reason where that is refused."""
        present = sized(self.spec, len(self._optimizers)).cluster
        free = ray.available_resources()
        reason = refusal(spec.cluster, present, free=free, device=self._device)
        if reason is not None:
            return reason
        if (reason := self._scaling.closed) is not None:
            return reason
        nodes = first_of_nodes(self._optimizers)
        try:
            rooms = self._ask(nodes, "looking at the host memory", "host_room")
        except (Died, Interrupted, RunFailed) as error:
            return f"the optimizer actors could not be asked for room ({error!r}); ask again"
        planned = planned_host_bytes(self._arenas.planned, self._arenas.nodes)
        free_bytes = {actor.node: rooms[actor.name].nbytes for actor in nodes}
        if (reason := too_little_room(planned, free_bytes)) is not None:
            return reason
        return self._regrouping.ask(Regroup(request, spec))

    def run(self) -> Iterator[Event]:
        """Trains to the last step; yields what happens as it happens."""
        for happened in self._run():
            self._metrics.observe(happened)
            yield happened
            if isinstance(happened, RunEvent):
                yield from self._exporters.follow(happened)

    def _run(self) -> Iterator[Event]:
        end = "finished"
        try:
            try:
                yield from self._start()
                yield from self._train()
                if self._makes_way:
                    self._keeps_arenas = True
                    return
            except Interrupted:
                end = "interrupted"
            except Died as death:
                if not self._started:
                    raise ProcessLost(str(death.cause)) from None
                raise death.cause from None
            yield from self._close_scaling("the run ended first")
            yield from self._keep_committed(self._patience_s)
            yield event(end, step=self._committed)
        except Exception as error:
            # Arenas that a life makes as it starts are worth nothing, but it may have found some.
            found = self._life.left is not None and not self._started
            if found or isinstance(error, ProcessLost | StateLost):
                log.exception("the run begins anew")
                self._keeps_arenas = found or isinstance(error, StateLost)
                raise
            log.exception("the run failed")
            if error is not self._snapshots.failure:  # else it is the last attempt that failed
                # Who did not answer a whole step long will not do so now.
                timeout = _CLOSE_S if isinstance(error, WaitTimeout) else self._patience_s
                yield from self._keep_what_can_be(timeout)
            raise
        finally:
            self._teardown()
            self._metrics.close()

    # Start

    def _start(self) -> Iterator[Event]:
        spec, left = self.spec, self._life.left
        times = [time.perf_counter()]
        # Lives after the first wait for devices, as for all else that may come back.
        device = self._device = self._life.device or pick_device(spec)
        workers = count(spec.cluster.workers, "worker")
        yield event("starting", what=f"placing {workers} and starting them")
        nodes = left.worker_nodes if left else ()
        again = self._life.number > 0
        for group in reserve_workers(
            spec, device, token=self._life.token, nodes=nodes, patient=again
        ):
            self._group = group
            self._look_for_stop()
            if left is not None:
                self._watch.check({*left.worker_nodes, *left.arena_nodes})
        if left is not None:
            self._start_optimizers(optimizer_homes_again(spec, left))
        try:
            self._crew.launch()
        except Died as death:
            yield from self._crew.replace(death, step=self._committed)
        placed = worker_nodes(self._workers)
        yield event("workers_placed", device=device, workers=len(self._workers), nodes=placed)
        if left is None:  # before the model is built, so that both start at once
            if again:
                spec = yield from self._suit_to_nodes()
            check_nodes(spec, placed)
            self._start_optimizers(optimizer_homes(spec, self._workers))
        yield from self._exporters.open()
        times.append(time.perf_counter())
        yield event("starting", what="building the model")
        try:
            if not self._crew.shards:
                self._crew.form()
        except Died as death:
            yield from self._crew.replace(death, step=self._committed)
        times.append(time.perf_counter())
        homes = arena_homes(spec, self._workers, self._optimizers)
        self._arenas.homes, self._nodes = homes, {*homes}
        buckets = cut_buckets(
            [shard for own in self._crew.shards for shard in own],
            bucket_parameters=spec.memory.optimizer.bucket_parameters,
            arenas_of_rank=lambda rank: arenas_for(spec, self._workers[rank], homes),
        )
        regions = slab_regions(self._crew.slab_bytes, self._workers, homes)
        actors = count(len(self._optimizers), "optimizer actor")
        if left is not None:
            yield event("starting", what=f"taking over the arenas with {actors}")
            yield from self._take_over(buckets, regions)
            times.append(time.perf_counter())
            yield event(
                REPLACED,
                generation=self._crew.generation,
                step=self._team.last.step,
                seconds=times[-1] - times[0],
                **parts_of(times),
            )
        else:
            buckets = yield from divide_updates(
                spec,
                buckets,
                device,
                workers=self._workers,
                optimizers=self._optimizers,
                ask=self._ask,
            )
            yield event("starting", what=f"filling the arenas of {actors}")
            planned = yield from self._fill_arenas(buckets, regions)
            yield event(
                STARTED,
                parameters=sum(bucket.size for bucket in buckets),
                buckets=len(buckets),
                planned_host_bytes=planned,
                step=self._committed,
                worker_nodes=[worker.node for worker in self._workers],
                arena_nodes=homes,
                optimizers=len(self._optimizers),
                mirrored=self._arenas.mirrors.wanted,
            )
        self._nodes.update(placed)  # from now on workers are replaced where they were
        self._started = True

    def _suit_to_nodes(self) -> Generator[Event, None, Spec]:
        asked = self.spec
        self.spec = suited_to(asked, by_node(self._workers), cores_of_nodes())
        if asked.memory.optimizer.mirrors and not self.spec.memory.optimizer.mirrors:
            self._arenas = ArenaSet(self.spec, self._arenas.token)
            text = "all workers are on one node now, so the optimizer state has no mirrors"
            yield event("warning", text=text)
        return self.spec

    def _start_optimizers(self, homes: Sequence[str]) -> None:
        for optimizer in start_optimizers(self.spec, homes, **self._marks(self._crew.generation)):
            self._optimizers.append(optimizer)

    def _fill_arenas(
        self, buckets: tuple[Bucket, ...], regions: list[SlabRegion]
    ) -> Generator[Event, None, dict[str, int]]:
        """Returns the bytes of host memory taken on each node."""
        snapshot = self._life.snapshot if not self._life.moved else None
        self._know(buckets, regions)
        origin: Path | Sources | None = snapshot
        if self._life.moved:
            self._committed, origin = self._moved.open(self._last_update)
            self._team.last = Update(self._committed, 0.0, None)
        if snapshot is not None:
            with SnapshotReader(snapshot) as reader:
                check_parameters(reader, self._snapshots.sizes)
                self._committed = reader.step
                self._team.last = Update(reader.step, 0.0, None)
            yield event("resumed", snapshot=str(snapshot), step=self._committed)
        self._snapshots.find(self._committed)
        actors, arenas = self._optimizers, self._arenas
        living = [run for run in living_runs() if run != self.spec.run or self._life.moved]
        self._ask([*self._workers, *actors], "start of the actors", "sweep", living)
        # Those of this run, which is among the living while it moves.
        if self._life.stale:
            sweep_nodes(self.spec, living_nodes(), self._life.stale)
        planned = planned_host_bytes(arenas.planned, arenas.nodes, regions, self._workers)
        rooms = self._ask(first_of_nodes(actors), "looking at the host memory", "host_room")
        check_host_bytes(planned, actors, rooms)
        self._filled = True
        refs = {}
        for index, actor in enumerate(actors):
            numbers = self._team.ownership.of(index)
            planned_here = {number: arenas.planned[number] for number in numbers}
            refs[actor.name] = actor.handle.create.remote(
                planned_here, arenas.paths(numbers), origin
            )
        self._gather(refs, "filling the arenas")
        yield from self._attach_or_replace()
        return planned

    def _last_update(self, versions: Iterable[int]) -> Update:
        records = self._records.steps()
        last = records[-1] if records else None
        return update_under_way({*versions}, last, self.spec.train.max_grad_norm)

    def _know(self, buckets: tuple[Bucket, ...], regions: list[SlabRegion]) -> None:
        """Takes down what follows from the cut, and who is to own which arena."""
        self._on_device = any(bucket.updater is not None for bucket in buckets)
        actors, arenas = self._optimizers, self._arenas
        arenas.plan(buckets, regions)
        self._snapshots.sizes = parameter_sizes(h for bucket in buckets for h in bucket.ranges)
        self._snapshots.arenas = len(arenas.used)
        # Arenas go to the actors of the same number as far as there are any, the others to balance.
        first = min(len(arenas.used), len(actors))
        own = [number if number < first else None for number, _ in enumerate(arenas.planned)]
        self._team.ownership = self._assign(own, actors)
        self._attach = partial(self._attach_workers, buckets, regions)

    def _take_over(
        self, buckets: tuple[Bucket, ...], regions: list[SlabRegion]
    ) -> Generator[Event, None, None]:
        """Goes on with the arenas of a controller that died, wherever it was.

        Its processes are dead or about to die: an arena is not owned, nor a worker's part of it,
        before the kernel has taken the lock from them. So what is read of the arenas once all locks
        are held stays so.
        """
        self._know(buckets, regions)  # by the sizes alone: who updates what is in the arenas
        self._filled = True
        ownership = self._team.ownership
        attach = {
            actor.name: actor.handle.attach.remote(self._arenas.paths(ownership.of(index)))
            for index, actor in enumerate(self._optimizers)
        }
        self._gather(attach, "taking over the arenas")
        held = self._ask(self._optimizers, "reading the arenas", "buckets")
        found = {bucket.index: bucket for own in held.values() for bucket in own}
        self._know(tuple(found[index] for index in sorted(found)), regions)
        self._team.ownership = ownership
        yield from self._attach_or_replace()
        answers = self._ask(self._optimizers, "reading the arenas", "versions")
        versions = {version for found in answers.values() for version in found}
        update = self._last_update(versions)
        self._committed = min(versions)
        self._snapshots.find(self._committed)
        self._team.finish(update, beside=self._crew.update(*update) if self._on_device else {})

    def _attach_or_replace(self) -> Iterator[Event]:
        try:
            yield from self._attach()
        except Died as death:
            yield from self._replace_workers(death)

    def _attach_workers(
        self, buckets: tuple[Bucket, ...], regions: list[SlabRegion]
    ) -> Iterator[Event]:
        """Each maps the arenas of its node; it reaches its buckets on others over the network."""
        timeout = self.spec.cluster.start_timeout_s
        # Only where actors are anywhere, and each owns the arena of its own number.
        remote = remote_ranks(buckets, self._workers, self._arenas.homes)
        self._team.serve(remote)
        addresses = yield from self._team.gather(
            "opening the arenas to other nodes", timeout, self._team.links
        )
        self._team.links = {}
        names = {number: self._optimizers[number].name for number in remote}
        attach = {}
        for rank, worker in enumerate(self._workers):
            arenas = self._arenas.paths(arenas_beside(worker, self._arenas.homes))
            servers = {n: addresses[name] for n, name in names.items() if rank in remote[n]}
            attach[worker.name] = worker.handle.attach.remote(
                buckets, arenas, regions[rank], servers
            )
        self._collect(attach, "attaching to the arenas", timeout, mortal=self._crew.mortal)

    def _start_workers(self, generation: int) -> Iterator[Placed]:
        return start_workers(self.spec, self._group, self._device, **self._marks(generation))

    def _replace_workers(self, death: Died) -> Iterator[Event]:
        """Afterwards the workers are as before their first step, with the arenas as they are."""
        step = self._team.last.step + 1
        yield from self._crew.replace(death, step=step, attach=self._attach)
        if self._on_device:
            # What the dead had updated of the last step, their successors leave alone.
            self._team.update_beside(self._crew.update(*self._team.last))

    def _assign(self, owners: Sequence[int | None], actors: Sequence[Placed]) -> Ownership:
        """Which of `actors` is to own each arena, after the `owners` that they have now."""
        homes = [actor.node for actor in actors]
        return assign_arenas(self._arenas.held_by(owners), homes, self._autoscaler.rates(actors))

    def _start_successor(self, index: int) -> Placed:
        return self._start_optimizer(index, self._optimizers[index].node)

    def _start_optimizer(self, index: int, node: str) -> Placed:
        return start_optimizer(self.spec, index, node, **self._marks(self._crew.generation))

    def _marks(self, generation: int) -> dict[str, Any]:
        """What a process of a generation bears."""
        logs = str(self.folder / "logs")
        return {"logs": logs, "token": self._life.token, "generation": generation}

    # Train

    def _train(self) -> Iterator[Event]:
        largest: dict[str, tuple[int, ...]] = {}
        self._scaling.open()
        for step in range(self._team.last.step + 1, self.spec.train.steps + 1):
            if self._regrouping.due() is not None:
                yield from self._make_way()
                return
            began = time.perf_counter()
            answers = yield from self._step(step)
            if self._moved.actors:
                release(None, [source.handle for source in self._moved.remove()])
            self._committed = self._team.last.step
            yield from self._snapshots.gather(self._committed)
            self._results = {worker.name: answers[worker.name] for worker in self._workers}
            actors = {actor.name for actor in self._optimizers}
            self._reports = {who: answers[who] for who in actors & answers.keys()}
            results = list(self._results.values())
            for result in results:
                largest = larger_shapes(largest, result.largest)
            check_budget(self._results, self.spec.memory.device_budget_bytes)
            exposed = (result.refresh.exposed_s for result in results)
            self._autoscaler.observe(time.perf_counter() - began, exposed, self._reports)
            yield from _told(self._autoscaler.look())
            yield from self._scale()
            rate = lr(step, train=self.spec.train)
            mirrored = yield from self._mirror(results[0])
            seconds = time.perf_counter() - began
            record = step_record(self.spec, results, rate, seconds, mirrored)
            # First: if this process dies in the update, the next one finishes it by the record. And
            # here: a driver that is killed reads no more of what was done until then, of which
            # there may be a snapshot.
            self._records.record(record)
            self._update(results[0], rate)
            yield record
            every = self.spec.snapshots.every_steps
            going = yield from self._see_notices()
            if going or (every and step % every == 0):
                self._snapshots.begin()
        if largest:
            yield event("largest_tensors", shapes=largest)

    def _see_notices(self) -> Generator[Event, None, bool]:
        """Whether a node of the run is to go soon: until then there is a snapshot of each step."""
        going = self._watch.notices(self._nodes)
        if new := sorted(going - self._going):
            yield event("node_draining", nodes=new, step=self._team.last.step)
        self._going = going
        return bool(going)

    def _make_way(self) -> Iterator[Event]:
        """Ends with all state in the arenas, at one step, for the next life to take over."""
        regroup = self._regrouping.due()
        assert regroup is not None
        yield from self._close_scaling(_ABOUT_TO_CHANGE)
        yield from self._settle(self._patience_s)
        self._makes_way = True
        yield event(LEAVING, step=self._committed, for_request=regroup.request)

    def _step(self, step: int) -> Generator[Event, None, dict[str, Any]]:
        """Forward and backward of `step` and the end of the update before it; the answers."""
        while True:
            refs = {w.name: w.handle.step.remote(step) for w in self._workers}
            yield from self._snapshots.commit()  # the files of the one before, beside the step
            try:
                # The optimizer actors are watched too: without them the workers wait in vain.
                return (
                    yield from self._team.gather(
                        f"step {step}",
                        self.spec.cluster.step_timeout_s,
                        refs,
                        self._team.updates,
                        watch=self._heartbeats,
                    )
                )
            except Died as death:
                yield from self._replace_workers(death)

    def _scale(self) -> Iterator[Event]:
        """Changes the optimizer actors if that was asked for and is ready: no update is under way,
        and none of their answers is owed."""
        change = self._scaling.due()
        if not isinstance(change, Change):
            if change is not None and change.request == AUTO:
                change = self._autoscaler.refused(change.wanted, change.reason)
            yield from _told(change)
            return
        began, start_seconds = time.perf_counter(), time.monotonic() - change.began
        present, before = len(self._optimizers), self._team.ownership
        actors = [*self._optimizers, *change.joining][: change.wanted]
        now = self._assign(before.owners, actors)
        self._unstoppable = True
        gone = yield from self._team.resize(change.wanted, now, joining=change.joining)
        self._unstoppable = False
        self._scaling.settle()
        self._autoscaler.changed()
        yield event(
            DONE,
            request=change.request,
            reason=change.reason,
            step=self._committed,
            before=present,
            after=change.wanted,
            joined=[actor.name for actor in change.joining],
            left=[actor.name for actor in gone],
            **handed_over(
                before,
                now,
                arenas=self._arenas.planned,
                homes=self._arenas.nodes,
                actors=actors,
            ),
            start_seconds=start_seconds,
            seconds=time.perf_counter() - began,
        )

    def _close_scaling(self, reason: str) -> Iterator[Event]:
        """Tells who had asked for what is given up; nobody had asked for what came by itself."""
        refused = self._scaling.close(reason)
        if refused is not None and refused.request != AUTO:
            yield from _told(refused)

    def _capacity(self) -> Capacity:
        cluster = self.spec.cluster
        return Capacity(
            nodes=tuple(sorted(set(self._arenas.homes))),
            arenas=len(self._arenas.used),
            cpus_per_actor=cluster.cpus_per_optimizer,
            free_cpus=free_cpus(),
        )

    def _mirror(self, result: StepResult) -> Generator[Event, None, Mirrored]:
        """Brings the step's gradients to where they survive the loss of a node, before any update
        with them; see `Mirrors.send`."""
        mirrors = self._arenas.mirrors
        if not mirrors.wanted or not result.usable:
            return NOTHING_MIRRORED
        return (yield from mirrors.send(result.step, self._team))

    def _update(self, result: StepResult, rate: float) -> None:
        factor = None
        if result.usable:
            factor = clipping_factor(result.grad_norm, self.spec.train.max_grad_norm)
        update = Update(result.step, rate, factor)
        # In this order: the actors' answer says that the workers' updates are done as well.
        self._team.update(update, beside=self._crew.update(*update) if self._on_device else {})

    # End

    @property
    def _patience_s(self) -> float:
        # An actor may just have been replaced.
        return self.spec.cluster.start_timeout_s + _GRACE_S

    def _keep_committed(self, timeout_s: float) -> Iterator[Event]:
        """Waits for the updates under way and keeps what is committed.

        Workers hold no state, so an interrupted run need not wait for the step they are in.
        """
        yield from self._settle(timeout_s)
        if self.spec.snapshots.at_end and self._committed > self._snapshots.newest:
            yield from self._snapshots.keep(self._committed)

    def _settle(self, timeout_s: float) -> Iterator[Event]:
        """Afterwards no update is under way, and no snapshot."""
        self._unstoppable = True
        yield from self._finish_update(timeout_s)
        yield from self._snapshots.commit()  # of an earlier step
        self._committed = self._team.last.step
        yield from self._snapshots.gather(self._committed)
        yield from self._snapshots.commit()

    def _finish_update(self, timeout_s: float) -> Iterator[Event]:
        while True:
            # The optimizer actors wait for the workers' part, whose end never comes if one dies.
            workers = self._workers if self._on_device else ()
            beside = {w.name: w.handle.finish_update.remote() for w in workers}
            try:
                # Watched alone: a worker may be in a step first, that nobody needs any more.
                yield from self._team.gather(
                    "the last update",
                    timeout_s,
                    self._team.updates,
                    watched=beside,
                    watch=self._heartbeats if self._on_device else self._optimizer_heartbeats,
                )
            except Died as death:
                yield from self._replace_workers(death)
            else:
                return

    def _keep_what_can_be(self, timeout_s: float) -> Iterator[Event]:
        """After a failure: all state is with the optimizer actors, which may be well."""
        try:
            yield from self._keep_committed(timeout_s)
        except Exception:
            log.exception("what was committed after step %d is lost", self._snapshots.newest)

    def _teardown(self) -> None:
        """Ends what was started, however far the start came. The arenas stay for who comes next."""
        closes = self._filled and not self._keeps_arenas
        closing = {
            actor.name: actor.handle.close.remote(
                [*self._arenas.paths(self._team.ownership.of(index)).values()]
            )
            for index, actor in enumerate(self._optimizers if closes else ())
        }
        try:
            collect(closing, what="closing the arenas", timeout_s=_CLOSE_S)
            closed = True
        except RunFailed as error:  # an actor is dead, or busy for longer
            log.warning("%s", error)
            closed = False
        self._scaling.close("the run has ended")
        placed = self._workers + self._optimizers + self._moved.actors
        release(self._group, [actor.handle for actor in placed])
        if not closed and self.spec.cluster.address != "local":  # there the driver sees to it
            sweep_nodes(self.spec, set(self._arenas.homes), [self._arenas.token])

    # Waiting

    def _ask(self, actors: list[Placed], what: str, method: str, *args: Any) -> dict[str, Any]:
        refs = {placed.name: getattr(placed.handle, method).remote(*args) for placed in actors}
        return self._gather(refs, what)

    def _gather(self, refs: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Raises Died for any of them."""
        timeout = self.spec.cluster.start_timeout_s
        return self._collect(refs, what, timeout, mortal=refs.keys() | self._crew.mortal)

    def _collect(
        self,
        refs: Mapping[str, Any],
        what: str,
        timeout_s: float,
        *,
        mortal: Container[str] = (),
        watched: Mapping[str, Any] = MappingProxyType({}),
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        try:
            return collect(
                refs,
                what=what,
                timeout_s=timeout_s,
                interrupted=self._interrupted,
                last_seen=self._last_seen,
                mortal=mortal,
                watched=watched,
                watch=watch,
            )
        except RunFailed:
            self._watch.check(self._nodes, now=True)  # which is why, if there is a why
            raise

    def _heartbeats_of(self, actors: Callable[[], list[Placed]]) -> Heartbeats:
        cluster = self.spec.cluster
        return Heartbeats(
            actors, timeout_s=cluster.heartbeat_timeout_s, step_timeout_s=cluster.step_timeout_s
        )

    def _interrupted(self) -> bool:
        """Raises StateLost when nobody can answer any more."""
        self._watch.check(self._nodes)
        # At the end there is nothing left to stop but keeping what is committed; and between two
        # owners an arena would be missing in that.
        return self._stop.is_set() and not self._unstoppable

    def _look_for_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def _last_seen(self, who: str) -> str:
        """What is known of a process that died: its own memory of it died with it."""
        who = who.removeprefix(UPDATE_ON)
        if (result := self._results.get(who)) is not None:
            return (
                f"it had finished step {result.step} with peaks in bytes: {listed(result.peaks)}; "
                f"in use then: {result.live_bytes:,} of device memory and "
                f"{result.host.in_use_bytes:,} of host memory"
            )
        committed = f"the last committed step is {self._committed}"
        if (report := self._reports.get(who)) is None:
            return committed
        host = report.host
        return (
            f"{committed}, after which it had {host.in_use_bytes:,} bytes of host memory in use, "
            f"at most {host.peak_bytes:,}"
        )


def _told(refused: Refused | None) -> Iterator[Event]:
    if refused is not None:
        yield event(REFUSED, request=refused.request, reason=refused.reason)
