"""The workers of a run, one generation after another.

Workers hold no state: weights, moments and gradients lie in the arenas. When one dies, its peers
are left in a collective with it, so all of them end; the next generation starts in their places,
forms a process group of its own, maps the same arenas and does the step under way again. A step is
a function of the weights and the samples, so it comes out the same to the last bit.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from flatpeak.controller.placement import Placed, release
from flatpeak.controller.runs import Event, event
from flatpeak.controller.waiting import DEATHS_IN_A_STEP, Died
from flatpeak.workers.buckets import Shard
from flatpeak.workers.errors import RunFailed, StateLost

UPDATE_ON = "the update on "
"""Begins the name of a worker's part of an update, as `update` asks for it."""


def parts_of(times: Sequence[float]) -> dict[str, float]:
    """Of a generation that came up between these four times, the seconds that each part took."""
    names = ("place_s", "build_s", "attach_s")
    return {name: end - start for name, (start, end) in zip(names, pairwise(times), strict=True)}


class Ask(Protocol):
    """Calls a method of all these actors and returns their answers by name."""

    def __call__(
        self, actors: list[Placed], what: str, method: str, *args: Any
    ) -> dict[str, Any]: ...


class WorkerGroup:
    """Starts the workers and replaces all of them when one dies.

    `start` gives the workers of a generation one by one, `ask` waits for their answers and raises
    Died for a worker. `workers` are those of the present generation, in order of rank. The first
    one is `generation`, on these `nodes` where there are arenas on them already.
    """

    def __init__(
        self,
        *,
        start: Callable[[int], Iterator[Placed]],
        ask: Ask,
        end: Callable[[list[Any]], None] = lambda handles: release(None, handles),
        generation: int = 0,
        nodes: Sequence[str] = (),
    ) -> None:
        self.workers: list[Placed] = []
        self.generation = generation
        self.shards: list[tuple[Shard, ...]] = []
        """Of each rank once the model is built; so are `slab_bytes`, which its boundaries take."""
        self.slab_bytes: list[int] = []
        self._names: set[str] = set()  # also while no worker of a generation is there yet
        self._nodes = [*nodes]
        self._deaths: Counter[int] = Counter()
        self._start, self._ask, self._end = start, ask, end

    @property
    def mortal(self) -> set[str]:
        """Whose death is no end: what waits for them is to catch Died and call `replace`."""
        return self._names | {UPDATE_ON + name for name in self._names}

    def launch(self) -> None:
        """Starts the workers, each on the node that it is given."""
        # One by one into the list, so that those that are there can be ended if the next cannot.
        for worker in self._start(self.generation):
            self.workers.append(worker)
            self._names.add(worker.name)
        nodes = self._ask(self.workers, "start of the workers", "node")
        self.workers[:] = [Placed(w.name, w.handle, nodes[w.name]) for w in self.workers]
        self._check_nodes()

    def form(self) -> None:
        """Brings the workers together in a process group and lets them build the model."""
        host, port = self._ask(self.workers[:1], "rendezvous", "open_rendezvous")["worker 0"]
        self._ask(self.workers, "forming the process group", "join", host, port)
        shards = self._ask(self.workers, "building the model", "build")
        self.shards = [shards[worker.name] for worker in self.workers]
        slabs = self._ask(self.workers, "sizing the boundaries", "slab_bytes")
        self.slab_bytes = [slabs[worker.name] for worker in self.workers]

    def update(self, *update: Any) -> dict[str, Any]:
        """Asks for what the workers are to update themselves; the answers to come, by name."""
        return {UPDATE_ON + w.name: w.handle.update.remote(*update) for w in self.workers}

    def replace(
        self, death: Died, *, step: int, attach: Callable[[], Iterable[Event]] = tuple
    ) -> Iterator[Event]:
        """Puts the next generation in the place of this one, of which one died in `step`.

        `attach` gives the new workers what the old ones had. Raises RunFailed when workers die
        again and again, and StateLost when they do not come back to their nodes.
        """
        if all(worker.node for worker in self.workers):
            self._nodes = self._nodes or [worker.node for worker in self.workers]
        while True:
            began = time.perf_counter()
            who = death.who.removeprefix(UPDATE_ON)
            self._deaths[step] += 1
            yield event("worker_lost", actor=who, step=step, reason=str(death.cause))
            if self._deaths[step] >= DEATHS_IN_A_STEP:
                raise RunFailed(
                    f"workers were lost {self._deaths[step]} times in step {step}, "
                    f"last {death.cause}"
                )
            try:
                seconds = yield from self._begin_generation(attach)
            except Died as again:
                death = again
                continue
            yield event(
                "workers_replaced",
                generation=self.generation,
                step=step,
                seconds=time.perf_counter() - began,
                **seconds,
            )
            return

    def _begin_generation(
        self, attach: Callable[[], Iterable[Event]]
    ) -> Generator[Event, None, dict[str, float]]:
        """Returns the seconds that each part took."""
        # Those that live, too: they wait for the dead one, in a process group without a future.
        self._end([worker.handle for worker in self.workers])
        self.workers.clear()
        self.generation += 1
        times = [time.perf_counter()]
        self.launch()
        times.append(time.perf_counter())
        self.form()
        times.append(time.perf_counter())
        yield from attach()
        times.append(time.perf_counter())
        return parts_of(times)

    def _check_nodes(self) -> None:
        if not self._nodes:
            return  # none of them had a node yet, so there is no arena on any
        for worker, node in zip(self.workers, self._nodes, strict=True):
            if worker.node != node:
                raise StateLost(
                    f"{worker.name} came back on node {worker.node}, and the weights are in the "
                    f"memory of node {node}, which is lost or full"
                )
