"""The driver's side of a run: check the job, start Ray, follow the controller, clean up.

Whatever way the run ends, nothing of it stays behind: no actor, no placement group, no local Ray
and no arena.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flatpeak.controller.cluster import NAMESPACE, check_cluster, connected
from flatpeak.controller.controller import Controller
from flatpeak.controller.dashboards.annotations import Annotator
from flatpeak.controller.dashboards.grafana import Grafana, token_from_environment
from flatpeak.controller.experiment_logs import check_experiment_logs, experiment_logs
from flatpeak.controller.growth import Growth
from flatpeak.controller.leftovers import HeldArenas, remove_arenas
from flatpeak.controller.lives import REPLACED, ControllerLost, Life, Lives, sized
from flatpeak.controller.metrics import serving_of
from flatpeak.controller.outlet import Outlet
from flatpeak.controller.placement import living_nodes, release_group_of, sweep_nodes
from flatpeak.controller.regrouping import Regroup
from flatpeak.controller.rescue import rescue
from flatpeak.controller.resume import Resume, check_parameters, snapshot_to_resume
from flatpeak.controller.runs import (
    Event,
    RunEvent,
    RunFolder,
    StepRecord,
    Summary,
    event,
    highest_of,
    runs_folder,
)
from flatpeak.controller.scale_requests import REFUSED, ScaleRequest, take_request
from flatpeak.controller.signals import StopSignals
from flatpeak.controller.spec import Spec, check_against_model, parse_spec, resolve_parallel
from flatpeak.controller.waiting import Interrupted, describe, listed
from flatpeak.workers import checkpoint
from flatpeak.workers.arena import sweep_stale
from flatpeak.workers.errors import ClusterError, FlatpeakError, InputError
from flatpeak.workers.host_memory import node_path
from flatpeak.workers.routers import auxiliary_coefficient, check_router_logits
from flatpeak.workers.settings import check_dispatch_budget, check_router_biases, samples_of
from flatpeak.workers.snapshot import SnapshotReader
from flatpeak.workers.support import check_supported, trained_sizes
from flatpeak.workers.weights import open_weights

_POLL_S = 0.25
_NAME_FREE_S = 10.0
_ANSWER_S = 5.0

log = logging.getLogger("flatpeak")


def resolve(spec: Spec, resume: Resume | None = None) -> Spec:
    """The spec with its degrees as numbers, after every check that needs no Ray.

    Raises the error of the first thing that cannot work: model, degrees, checkpoint, machine, data,
    or the snapshot that is gone on from, which is of another model.
    """
    config = checkpoint.load_config(path=spec.model.path, config=spec.model.config)
    vocab_size = checkpoint.vocab_size(config)
    resolved = _resolved(spec, config)
    model = checkpoint.build_meta_model(config)
    check_supported(model)
    check_router_biases(resolved, model)
    if auxiliary_coefficient(config, resolved.train.router_aux_loss_coef):
        check_router_logits(model)
    check_dispatch_budget(resolved, model)
    if resume is not None:
        with SnapshotReader(resume.snapshot) as reader:
            check_parameters(reader, trained_sizes(model))
    open_weights(resolved, model)
    check_cluster(resolved, parameters=sum(weight.numel() for weight in model.parameters()))
    samples_of(resolved, vocab_size=vocab_size)
    serving_of(resolved.metrics)
    _marks(resolved)
    check_experiment_logs(resolved.logging)
    return resolved


def regrouped(asked: Spec, present: Spec, request: ScaleRequest) -> Spec:
    """The job with other processes than at `present`, its degrees resolved; raises what `resolve`
    raises for them."""
    data, optimizers = asked.model_dump(), present.cluster.optimizers
    if request.workers is None:
        data["cluster"] |= {"workers": present.cluster.workers, "optimizers": request.optimizers}
        data["parallel"] = present.parallel.model_dump()
        optimizers = request.optimizers or 0
    else:
        # With the actors of the job: there may be more or fewer now than it could begin with.
        data["cluster"]["workers"] = request.workers
        data["parallel"] |= request.degrees
    spec = parse_spec(data, source=f"the job with {request.wanted}")
    config = checkpoint.load_config(path=spec.model.path, config=spec.model.config)
    resolved = _resolved(spec, config)
    check_dispatch_budget(resolved, checkpoint.build_meta_model(config))
    return sized(resolved, optimizers)


def _suits(spec: Spec) -> bool:
    try:
        _resolved(spec, checkpoint.load_config(path=spec.model.path, config=spec.model.config))
    except InputError:
        return False
    return True


def _resolved(spec: Spec, config: Any) -> Spec:
    """The spec with its degrees as numbers, which suit the model."""
    resolved = resolve_parallel(
        spec, experts=checkpoint.num_experts(config), heads=checkpoint.attention_heads(config)
    )
    check_against_model(
        resolved,
        experts=checkpoint.num_experts(config),
        attention_heads=checkpoint.attention_heads(config),
        key_value_heads=checkpoint.kv_heads(config),
    )
    return resolved


def train(spec: Spec, on_event: Callable[[Event], None]) -> Summary:
    """Runs the job to its end; `on_event` sees every step and event as it happens.

    Raises FlatpeakError when it cannot, KeyboardInterrupt when SIGINT or SIGTERM ended it early;
    what was committed until then is in the last snapshot. A second signal does not wait for that.
    """
    # First: what dead runs left takes the room of this one. In a cluster those who know which runs
    # live there do it.
    if spec.cluster.address == "local":
        sweep_stale(node_path(spec.cluster.shm_dir))
    resume = snapshot_to_resume(spec, runs_folder(spec.runs_dir) / spec.run)
    asked, spec = spec, resolve(spec, resume)
    with ExitStack() as after, StopSignals() as signals, RunFolder.create(spec) as folder:
        outlets = [*_marks(spec), *experiment_logs(spec, folder.path)]
        follower = _Follower(folder, on_event, outlets)
        # From the last to the first, when the folder says how the run ended.
        after.callback(follower.warn_of_failures)
        for outlet in outlets:
            after.enter_context(outlet)
        after.callback(follower.write_report)
        for text in resume.warnings if resume else ():
            follower(event("warning", text=text))
        try:
            lives = Lives(
                spec, folder.path, resume and resume.snapshot.resolve(), alive=living_nodes
            )
            _drive(lives, _Requests(asked, lives, follower), follower, signals)
        except FlatpeakError as error:
            failed = event("failed", reason=str(error))
            folder.record(failed)
            for outlet in outlets:
                outlet(failed)
            raise
        finally:
            follower.write_peaks()
        return follower.summary(spec)


def _marks(spec: Spec) -> list[Outlet]:
    """Raises InputError where Grafana is asked for, but no token is there."""
    url = spec.metrics.grafana_url
    return [] if url is None else [Annotator(Grafana(url, token_from_environment()), spec.run)]


def _drive(
    lives: Lives, requests: "_Requests", follower: "_Follower", signals: StopSignals
) -> None:
    spec = lives.life.spec
    local = spec.cluster.address == "local"
    what = "Ray on this machine" if local else f"in the Ray cluster at {spec.cluster.address}"
    follower(event("starting", what=f"starting {what}"))
    try:
        with connected(spec) as warnings:
            signals.catch()
            address = ray.get_runtime_context().gcs_address
            follower.folder.set_cluster(address=address, namespace=NAMESPACE)
            for warning in warnings:
                follower(warning)
            if not signals.count:
                _supervise(lives, requests, follower, signals)
    except SystemExit:  # SIGTERM while Ray was starting: it had taken the signal over
        raise KeyboardInterrupt from None
    except ClusterError:
        if signals.count:  # Ray did not start, but nobody waits for it any more
            raise KeyboardInterrupt from None
        raise
    finally:
        for token in lives.tokens:
            remove_arenas(spec.cluster.shm_dir, spec.run, token)
    if not follower.finished:
        raise KeyboardInterrupt


class _Follower:
    """Writes down every event and keeps what the summary needs."""

    def __init__(
        self,
        folder: RunFolder,
        on_event: Callable[[Event], None],
        outlets: Sequence[Outlet],
    ) -> None:
        self.folder, self._on_event, self._outlets = folder, on_event, outlets
        self._steps: list[StepRecord] = []
        self._kinds: set[str] = set()
        self._began = time.time()

    @property
    def ended(self) -> bool:
        """Whether the run has told how it ends."""
        return bool(self._kinds & {"finished", "interrupted"})

    @property
    def finished(self) -> bool:
        """Whether the run came to its last step."""
        return "finished" in self._kinds

    def __call__(self, happened: Event) -> None:
        if isinstance(happened, StepRecord):
            while self._steps and self._steps[-1].step >= happened.step:
                self._steps.pop()  # done again
            self._steps.append(happened)  # the controller has recorded it
        else:
            self.folder.record(happened)
            self._kinds.add(happened.kind)
        self._on_event(happened)
        for outlet in self._outlets:
            outlet(happened)
        self.warn_of_failures()

    def warn_of_failures(self) -> None:
        """Of outlets, each once."""
        for outlet in self._outlets:
            if (text := outlet.take_failure()) is not None:
                self(event("warning", text=text))

    def catch_up(self, step: int) -> None:
        """Hands on the steps until this one that a controller recorded before it died, and could
        not tell of any more."""
        last = self._steps[-1].step if self._steps else 0
        for record in self.folder.steps():
            if last < record.step <= step:
                self(record)

    def last_seen(self, who: str) -> str:
        """What is known of a controller that died."""
        if not self._steps:
            return "before its first step"
        last = self._steps[-1]
        return f"after step {last.step}, with peaks in bytes: {listed(last.peak_bytes)}"

    def write_peaks(self) -> None:
        try:
            steps = self.folder.steps()  # those before a resume too
        except InputError as error:  # the file was damaged; that does not undo this run
            steps = self._steps
            text = f"{error}; peaks.parquet has the steps since this start only"
            self(event("warning", text=text))
        rows = [
            {"step": step.step, "component": component, "bytes": nbytes}
            for step in steps
            for component, nbytes in step.peak_bytes.items()
        ]
        schema = pa.schema(
            [("step", pa.int64()), ("component", pa.string()), ("bytes", pa.int64())]
        )
        pq.write_table(pa.Table.from_pylist(rows, schema), self.folder.path / "peaks.parquet")

    def write_report(self) -> None:
        # Here, since it imports matplotlib, for which no run should start later.
        from flatpeak.controller.report import write_report

        try:
            write_report(self.folder)
        except InputError as error:  # the records are there, and the run is what it is
            text = f"{error}; there is no report"
            self._on_event(event("warning", text=text))

    def summary(self, spec: Spec) -> Summary:
        return Summary(
            run=spec.run,
            folder=str(self.folder.path),
            steps=len(self._steps),
            loss=self._steps[-1].loss if self._steps else float("nan"),
            seconds=time.time() - self._began,
            peak_bytes=highest_of(step.peak_bytes for step in self._steps),
            device_budget_bytes=self._steps[-1].device_budget_bytes if self._steps else None,
        )


def _supervise(
    lives: Lives, requests: "_Requests", follower: _Follower, signals: StopSignals
) -> None:
    """Starts controllers one after the other until one comes to the run's end."""
    spec = lives.life.spec
    with ExitStack() as after:
        after.callback(_sweep_cluster, lives)
        held = after.enter_context(HeldArenas(spec.cluster.shm_dir, spec.run))
        while True:
            dead = lives.life.token
            try:
                _follow(lives, held, requests, follower, signals)
                if not lives.move():
                    return
            except FlatpeakError as error:
                if follower.ended:  # all was done but the end of the processes
                    return
                if signals.count and not lives.settled and not lives.life.inherits:
                    raise KeyboardInterrupt from None
                requests.abandon(but=lives.moving)
                release_group_of(spec.run, dead)
                try:
                    for happened in lives.go_on(error, fitting=requests.fitting):
                        follower(happened)
                        requests.observe(happened)
                except FlatpeakError:
                    _keep_orphans(lives, error, follower, signals)
                    raise
                held.hold(lives.arenas)
                for token in lives.life.stale:
                    remove_arenas(spec.cluster.shm_dir, spec.run, token)


def _keep_orphans(
    lives: Lives, error: FlatpeakError, follower: _Follower, signals: StopSignals
) -> None:
    """After the last life, which ended with `error`: what is committed goes into a snapshot."""
    spec, files = lives.spec, lives.orphans(error)
    if not files or not spec.snapshots.at_end:
        return
    try:
        saved = rescue(spec, files, follower.folder, lambda: signals.count > 1)
    except (FlatpeakError, RayError, Interrupted) as failure:
        text = f"what was done after the newest snapshot is lost: {failure or 'interrupted'}"
        follower(event("warning", text=text))
        return
    if saved is not None:
        follower(saved)


def _sweep_cluster(lives: Lives) -> None:
    """Removes what lives that died left on other nodes; what one life makes it removes itself."""
    spec = lives.life.spec
    if len(lives.tokens) == 1 or spec.cluster.address == "local":
        return
    try:
        sweep_nodes(spec, living_nodes(), lives.tokens)
    except RayError as error:  # the cluster is gone, or this driver's place in it
        log.warning("arenas of this run may be left in the cluster: %s", error)


def _follow(
    lives: Lives,
    held: HeldArenas,
    requests: "_Requests",
    follower: _Follower,
    signals: StopSignals,
) -> None:
    """Hands on a controller's events until it is done; the first signal asks it to stop.

    Raises what the controller raises, and ControllerLost when it dies.
    """
    life = lives.life
    controller = _start_controller(life, follower.folder)
    events = controller.run.options(num_returns="streaming").remote()
    answer: Any = None
    give_up = math.inf
    silent = True
    requests.serve(controller)
    try:
        while True:
            requests.look()
            if signals.count > 1:
                raise KeyboardInterrupt
            # What an earlier life left is kept by none but one that has taken it over.
            if signals.count and answer is None and (lives.settled or not life.inherits):
                answer = controller.stop.remote()
                give_up = time.monotonic() + _ANSWER_S
            # A controller that is not up yet hears nothing, and has done nothing worth keeping.
            if silent and time.monotonic() > give_up and not ray.wait([answer], timeout=0)[0]:
                raise KeyboardInterrupt
            ready, _ = ray.wait([events], timeout=_POLL_S)
            if ready:
                happened: Any = ray.get(next(events))
                silent = False
                if isinstance(happened, RunEvent) and happened.kind == REPLACED:
                    follower.catch_up(happened.detail["step"])
                follower(happened)
                lives.observe(happened)
                if isinstance(happened, RunEvent):
                    for told in lives.moved(happened):
                        follower(told)
                        requests.observe(told)
                requests.observe(happened)
                held.hold(lives.arenas)
    except StopIteration:
        return
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, FlatpeakError):
            raise cause from None
        described = describe(error, "the controller", "the run", follower.last_seen)
        if isinstance(error, RayActorError):
            raise ControllerLost(str(described)) from None
        raise described from None
    finally:
        ray.kill(controller)


class _Requests:
    """Brings requests from the run folder to the controller, one at a time, and notes refusals.

    `asked` is the job as its user wrote it: other workers may mean other degrees.
    """

    def __init__(self, asked: Spec, lives: Lives, follower: _Follower) -> None:
        self._asked_spec, self._lives, self._follower = asked, lives, follower
        self._controller: Any = None
        self._asked: tuple[ScaleRequest, Any] | None = None
        self._growth = Growth(asked, suits=_suits)
        self._owed: set[str] = set()  # whose end has not been told of yet

    def serve(self, controller: Any) -> None:
        """From now on they are for this controller."""
        self._controller, self._asked = controller, None

    def look(self) -> None:
        if self._asked is None:
            request = take_request(self._follower.folder)
            if request is None and self._lives.settled:
                request = self._growth.look(self._lives)
            if request is not None:
                self._owed.add(request.id)
                self._ask(request)
            return
        request, answer = self._asked
        reason: Any
        if not ray.wait([answer], timeout=0)[0]:
            return
        self._asked = None
        try:
            reason = ray.get(answer)
        except RayTaskError as error:  # a request never ends a run
            reason = str(describe(error, "the controller", "scaling"))
        if reason is not None:
            self._refuse(request.id, reason)

    def _ask(self, request: ScaleRequest) -> None:
        anywhere = self._asked_spec.cluster.optimizer_placement == "anywhere"
        # Arenas stay where they are, and those of actors anywhere have no other actors there.
        present = self._lives.spec
        if request.workers is None and not anywhere:
            answer = self._controller.scale.remote(request.id, request.optimizers)
        else:
            try:
                if request.optimizers == present.cluster.optimizers:
                    raise InputError(f"the run has {request.wanted} already")
                spec = regrouped(self._asked_spec, present, request)
            except FlatpeakError as error:
                self._refuse(request.id, str(error))
                return
            self._lives.want(Regroup(request.id, spec))
            answer = self._controller.regroup.remote(request.id, spec)
        self._asked = request, answer

    def fitting(self) -> Spec | None:
        """The job with as many workers as a lost node leaves room for, if that is another."""
        present = self._lives.spec
        workers = self._growth.left(self._lives)
        if workers == present.cluster.workers:
            return None
        try:
            return regrouped(self._asked_spec, present, ScaleRequest(workers=workers))
        except FlatpeakError as error:  # of a budget, say; room for as many as before may come back
            log.warning("the run cannot go on with %d workers: %s", workers, error)
            return None

    def observe(self, happened: Event) -> None:
        if isinstance(happened, RunEvent):
            request = happened.detail.get("request", "")
            self._owed.discard(request)
            if happened.kind == REFUSED:
                self._growth.refused(request)

    def abandon(self, *, but: str | None) -> None:
        """The controller is gone, and what it was asked for with it, `but` for one request."""
        self._asked = None
        for request in sorted(self._owed - {but}):
            reason = "the controller ended while it was at it; ask again"
            self._follower(event(REFUSED, request=request, reason=reason))
        self._owed &= {but}

    def _refuse(self, request: str, reason: str) -> None:
        refused = event(REFUSED, request=request, reason=reason)
        self._follower(refused)
        self.observe(refused)


def _start_controller(life: Life, folder: RunFolder) -> Any:
    """The run's controller; its name in the cluster keeps a second run of that name out.

    It lives on this node, so that whoever started the run knows where `metrics.port` is: Ray puts
    an actor that asks for no resources on any node.
    """
    spec = life.spec
    serving = serving_of(spec.metrics)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Controller).options(
        name=f"flatpeak-{spec.run}", num_cpus=0, max_concurrency=3, scheduling_strategy=here
    )
    deadline = time.monotonic() + _NAME_FREE_S
    while True:
        try:
            return actor.remote(life, str(folder.path.resolve()), serving)
        except ActorAlreadyExistsError:
            # The one of a driver that was just killed goes within seconds.
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"a run named {spec.run} is going on in this cluster, started from another "
                    "machine or runs_dir; stop it there, or choose another name by --set run=..."
                ) from None
            time.sleep(_POLL_S)
