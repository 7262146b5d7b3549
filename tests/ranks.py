"""Real multi-process ranks for tests: a pool of warm processes joined by gloo.

`run_ranks(world, fn, *args)` calls `fn(rank, *args)` on `world` processes inside an initialised
default process group and returns the results in rank order. It raises the InputError of a rank as
it is, and AssertionError with the traceback of any other failure. The processes live as long as the
test session, so that a test does not pay for importing torch.
"""

import atexit
import gc
import multiprocessing as mp
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from flatpeak.workers.errors import InputError

TIMEOUT_S = 150.0


def _serve(pipe: Any, paths: list[str]) -> None:
    sys.path[:] = paths
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        rank, world, store, timeout_s, call = job
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            fn, args = cloudpickle.loads(call)
            pipe.send((True, cloudpickle.dumps(fn(rank, *args))))
        except BaseException as error:
            # Tell before leaving the group: the others fail as soon as this one has left.
            trace = traceback.format_exc()
            error.add_note(trace)
            pipe.send((False, error if isinstance(error, InputError) else trace))
        finally:
            fn = args = None
            # Groups that something dead still refers to keep their threads, which spin.
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()


class _Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _grow(self, world: int) -> None:
        while len(self._processes) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(theirs, list(sys.path)), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self, world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        self._grow(world)
        # The ranks cannot import a test module: ship its functions by value.
        module = sys.modules.get(fn.__module__)
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        call = cloudpickle.dumps((fn, args))
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(world):
                self._pipes[rank].send((rank, world, store, timeout_s, call))
            try:
                return self._collect(world, timeout_s)
            except BaseException:
                self.close()  # the other ranks may hang in a collective: start afresh
                raise

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < world:
            waiting = {self._pipes[rank]: rank for rank in range(world) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"ranks {sorted(waiting.values())} did not answer")
            failures = {}
            for pipe in ready:
                ok, payload = pipe.recv()
                if ok:
                    results[waiting[pipe]] = cloudpickle.loads(payload)
                else:
                    failures[waiting[pipe]] = payload
            # A rank that was refused may have taken down another.
            for error in failures.values():
                if isinstance(error, InputError):
                    raise error
            for rank, trace in failures.items():
                raise AssertionError(f"rank {rank} of {world} failed:\n{trace}")
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


_pool = _Pool()
atexit.register(_pool.close)


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    return _pool.run(world, fn, args, timeout_s)
