"""The driver's side of a run: check the job, start Ray, follow the controller, clean up.

Whatever way the run ends, nothing of it stays behind: no actor, no placement group, no local Ray
and no arena.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.exceptions import RayActorError, RayTaskError

from flatpeak.controller.controller import Controller
from flatpeak.controller.runs import Event, RunEvent, RunFolder, StepRecord, Summary
from flatpeak.controller.spec import Spec, check_against_model, resolve_parallel
from flatpeak.workers import checkpoint
from flatpeak.workers.arena import sweep_stale
from flatpeak.workers.data import open_samples
from flatpeak.workers.errors import ClusterError, FlatpeakError, RunFailed
from flatpeak.workers.weights import open_weights

NAMESPACE = "flatpeak"
_CONNECT_S = 5.0
_OBJECT_STORE_BYTES = 256 * 2**20  # tensors do not travel through it


def resolve(spec: Spec) -> Spec:
    """The spec with its degrees as numbers, after every check that needs no cluster.

    Raises the InputError of the first thing that cannot work: model, degrees, checkpoint, data.
    """
    config = checkpoint.load_config(path=spec.model.path, config=spec.model.config)
    experts, heads = checkpoint.num_experts(config), checkpoint.attention_heads(config)
    vocab_size = checkpoint.vocab_size(config)
    resolved = resolve_parallel(spec, experts=experts, heads=heads)
    check_against_model(
        resolved,
        experts=experts,
        attention_heads=heads,
        vocab_size=vocab_size,
        key_value_heads=checkpoint.kv_heads(config),
    )
    open_weights(resolved)
    data = resolved.data
    open_samples(
        source=data.source,
        tokenizer=data.tokenizer,
        sequence_length=resolved.train.sequence_length,
        seed=resolved.train.seed,
        text_column=data.text_column,
        tokens_column=data.tokens_column,
        vocab_size=vocab_size,
        cache_dir=data.cache_dir,
    )
    return resolved


def train(spec: Spec, on_event: Callable[[Event], None]) -> Summary:
    """Runs the job to its end; `on_event` sees every step and event as it happens.

    Raises FlatpeakError when it cannot, KeyboardInterrupt when SIGINT or SIGTERM ended it early;
    what was committed until then is in the last snapshot.
    """
    spec = resolve(spec)
    with (
        RunFolder.create(spec) as folder,
        _connected(spec) as warnings,
    ):
        folder.set_cluster(address=ray.get_runtime_context().gcs_address, namespace=NAMESPACE)
        sweep_stale(spec.cluster.shm_dir)
        follower = _Follower(folder, on_event)
        for warning in warnings:
            follower(warning)
        try:
            _follow(spec, folder, follower)
        finally:
            sweep_stale(spec.cluster.shm_dir)
            follower.write_peaks()
        return follower.summary(spec)


class _Follower:
    """Writes down every event and keeps what the summary needs."""

    def __init__(self, folder: RunFolder, on_event: Callable[[Event], None]) -> None:
        self._folder, self._on_event = folder, on_event
        self._steps: list[StepRecord] = []
        self._began = time.time()

    def __call__(self, event: Event) -> None:
        self._folder.record(event)
        if isinstance(event, StepRecord):
            self._steps.append(event)
        self._on_event(event)

    def write_peaks(self) -> None:
        rows = [
            {"step": step.step, "component": component, "bytes": nbytes}
            for step in self._steps
            for component, nbytes in step.peak_bytes.items()
        ]
        schema = pa.schema(
            [("step", pa.int64()), ("component", pa.string()), ("bytes", pa.int64())]
        )
        pq.write_table(pa.Table.from_pylist(rows, schema), self._folder.path / "peaks.parquet")

    def summary(self, spec: Spec) -> Summary:
        peaks: dict[str, int] = {}
        for step in self._steps:
            for component, nbytes in step.peak_bytes.items():
                peaks[component] = max(nbytes, peaks.get(component, 0))
        return Summary(
            run=spec.run,
            folder=str(self._folder.path),
            steps=len(self._steps),
            loss=self._steps[-1].loss if self._steps else float("nan"),
            seconds=time.time() - self._began,
            peak_bytes=peaks,
            budget_bytes=self._steps[-1].budget_bytes if self._steps else None,
        )


def _follow(spec: Spec, folder: RunFolder, on_event: Callable[[Event], None]) -> None:
    controller: Any = (
        ray.remote(Controller)
        .options(name=f"flatpeak-{spec.run}", num_cpus=0, max_concurrency=2)
        .remote(spec, str(folder.path.resolve()))
    )
    interrupted = False
    events = controller.run.options(num_returns="streaming").remote()
    with _signals_to(lambda: controller.stop.remote()) as stopping:
        try:
            for ref in events:
                event: Any = ray.get(ref)
                interrupted |= isinstance(event, RunEvent) and event.kind == "interrupted"
                on_event(event)
        except RayTaskError as error:
            raise _unwrapped(error) from None
        except RayActorError as error:
            raise RunFailed(f"the controller died: {error}") from None
        finally:
            ray.kill(controller)
    if interrupted or stopping.is_set():
        raise KeyboardInterrupt


def _unwrapped(error: RayTaskError) -> FlatpeakError:
    cause = error.cause
    if isinstance(cause, FlatpeakError):
        return cause
    return RunFailed(f"the controller failed:\n{error}")


@contextmanager
def _signals_to(stop: Callable[[], Any]) -> Iterator[threading.Event]:
    """While open, SIGINT and SIGTERM ask the run to stop; a second one is not waited for."""
    stopping = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()
        stop()

    # Signals reach the main thread alone; elsewhere the caller handles them.
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _connected(spec: Spec) -> Iterator[list[RunEvent]]:
    """Inside, Ray is connected: one of our own for address "local", else the one that is there."""
    if spec.cluster.address == "local":
        warnings = _start_local(spec)
    else:
        warnings = []
        _connect(spec.cluster.address)
    try:
        yield warnings
    finally:
        ray.shutdown()


def _start_local(spec: Spec) -> list[RunEvent]:
    cluster, cores = spec.cluster, os.cpu_count() or 1
    needed = (
        cluster.workers * cluster.cpus_per_worker + cluster.optimizers * cluster.cpus_per_optimizer
    )
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=max(needed, cores),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
    )
    if needed <= cores:
        return []
    text = (
        f"{cluster.workers} workers x {cluster.cpus_per_worker} and {cluster.optimizers} optimizer "
        f"actors x {cluster.cpus_per_optimizer} ask for {needed} cores, this machine has {cores}: "
        "steps will be slower"
    )
    return [RunEvent(kind="warning", time=time.time(), detail={"text": text})]


def _connect(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        # Ray retries a dead address for minutes; a plain connection answers at once.
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"no Ray cluster answers at cluster.address = {address}: {error}; give host:port "
                "of its head, or local to start one here"
            ) from None
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    except Exception as error:  # Ray raises many types here, all of them mean: not connected
        raise ClusterError(f"cannot join the Ray cluster at {address}: {error}") from error
