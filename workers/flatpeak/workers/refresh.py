"""Each step's weights come from the arenas before the forward pass reaches what uses them.

The optimizer actors update buckets in the order of first use, so the forward pass of the next step
runs beside the update. A thread goes through the modules in that order as well, waits for their
buckets and copies, while earlier modules run; the call of a module waits for its own weights alone.

A weight may be overwritten once the step before has used it for the last time, in its backward
pass, which ends before this step begins: so the thread may be as far ahead as the update lets it.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import nn

from flatpeak.workers.errors import WaitTimeout
from flatpeak.workers.gradients import Delivery, GradientStream, InPlace
from flatpeak.workers.model import LocalParameter, ShardedModel
from flatpeak.workers.partition import parts
from flatpeak.workers.progress import WEIGHTS, waiting
from flatpeak.workers.streams import streams_of


@dataclass(frozen=True)
class RefreshReport:
    """How one step's weights came to this rank."""

    buckets: int = 0
    overlapped_buckets: int = 0
    """Of them, those that were not yet updated when the first module had its weights."""
    exposed_s: float = 0.0
    """Seconds that the forward pass stood still for weights: until they were there, and shared with
    replicas."""
    first_s: float = 0.0
    """Of them, those before the first module, which nothing can hide."""


class WeightRefresh:
    """Brings the weights of `sharded` out of `stream` before the modules that use them are called.

    `begin` opens a step, `finish` closes it. All ranks call the modules in the same order, so the
    broadcasts among replicas, which are collective, meet each other. What is `in_place` here is
    waited for and not copied.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        stream: GradientStream,
        *,
        timeout_s: float,
        in_place: InPlace | None = None,
    ) -> None:
        self.report = RefreshReport()
        self._sharded, self._stream = sharded, stream
        self._version = -1
        self._due: dict[nn.Module, list[LocalParameter]] = {}
        self._ahead: Ahead | None = None
        self._timeout_s, self._in_place = timeout_s, in_place
        self._streams = streams_of(sharded.parameters[0].tensor.device)
        self._deliveries = {
            module: stream.deliveries((p.name, p.own_start, _owned(p)) for p in parameters)
            for module, parameters in sharded.users.items()
        }
        # A module must not keep the trainer's arenas mapped once it is done with them.
        refresh = weakref.proxy(self)
        for module in sharded.users:
            # Before the hook of FSDP2, which gathers the shards.
            module.register_forward_pre_hook(lambda called, _: refresh._bring(called), prepend=True)

    def begin(self, *, version: int) -> None:
        """From now on the modules wait for the weights of `version`."""
        if self._ahead is not None:
            self._ahead.join()  # of a step that failed
        for module in self._sharded.fsdp_modules():
            module.reshard()  # a gathered copy would hide the refreshed shard
        self._version, self._due = version, dict(self._sharded.users)
        self.report = RefreshReport(buckets=self._stream.buckets)
        deliver = partial(
            self._stream.deliver,
            version=version,
            timeout_s=self._timeout_s,
            streams=self._streams,
            after=(self._streams.now(),),
            in_place=self._in_place,
        )
        self._ahead = Ahead(deliver, self._deliveries, timeout_s=2 * self._timeout_s)

    def finish(self) -> RefreshReport:
        """Brings what the forward pass did not use. Collective over replica groups."""
        for module in list(self._due):
            self._bring(module)
        assert self._ahead is not None, "finish() without begin()"
        self._ahead.join()
        return self.report

    @torch.no_grad()
    def _bring(self, module: nn.Module) -> None:
        # Later microbatches, and layers that recompute, find the weights in place.
        parameters = self._due.pop(module, None)
        if parameters is None:
            return
        assert self._ahead is not None
        first = len(self._due) == len(self._sharded.users) - 1
        began = time.perf_counter()
        with waiting(WEIGHTS):
            self._ahead.wait_for(module)
        with waiting():
            for parameter in parameters:
                _share_with_replicas(parameter)
        exposed_s = self.report.exposed_s + time.perf_counter() - began
        if first:
            behind = self._stream.buckets_before(self._version)
            self.report = replace(self.report, overlapped_buckets=behind, first_s=exposed_s)
        self.report = replace(self.report, exposed_s=exposed_s)


class Ahead:
    """Delivers the weights of module after module in a thread, ahead of who waits for them.

    `deliver` returns when all it was given is there, so whatever is issued afterwards finds the
    weights, by FSDP2's own streams too. What it raises, all who still wait raise. `timeout_s` is
    for one wait, and long enough for `deliver` to give up first where it waits itself.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[Delivery]], None],
        deliveries: Mapping[nn.Module, Sequence[Delivery]],
        *,
        timeout_s: float,
    ) -> None:
        self._deliver, self._deliveries, self._timeout_s = deliver, deliveries, timeout_s
        self._there = {module: Event() for module in deliveries}
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def wait_for(self, module: nn.Module) -> None:
        """Return when the module's weights are there."""
        if not self._there[module].wait(self._timeout_s):
            raise self._hangs()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Return when nothing is delivered any more."""
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise self._hangs()

    def _run(self) -> None:
        try:
            for module, deliveries in self._deliveries.items():
                self._deliver(deliveries)
                self._there[module].set()
        except BaseException as error:
            self._error = error
            for there in self._there.values():
                there.set()

    def _hangs(self) -> WaitTimeout:
        done = sum(there.is_set() for there in self._there.values())
        return WaitTimeout(
            f"the thread that copies weights out of the arenas has got to module {done + 1} of "
            f"{len(self._there)} and made no more of it for {self._timeout_s:g} s: the device of "
            "this rank hangs, or cluster.step_timeout_s is too short for its copies"
        )


def _owned(parameter: LocalParameter) -> torch.Tensor:
    """The elements that come to this rank from the arenas; the others come from its replicas."""
    start, stop = parameter.own_start, parameter.own_stop
    return parameter.flat[start - parameter.start : stop - parameter.start]


def _share_with_replicas(parameter: LocalParameter) -> None:
    if parameter.rule == "bias":
        dist.broadcast(parameter.tensor, src=0)
    elif parameter.axis is not None and parameter.axis.replica_group is not None:
        ranks = parameter.axis.replica_ranks
        # Every replica cuts the same range into the same parts, so all agree on who sends what.
        for part, owner in zip(
            parameter.flat.tensor_split(_cuts(parameter, ranks)), ranks, strict=True
        ):
            dist.broadcast(part, src=owner, group=parameter.axis.replica_group)


def _cuts(parameter: LocalParameter, ranks: tuple[int, ...]) -> list[int]:
    return [stop for _, stop in parts(parameter.stop - parameter.start, len(ranks))[:-1]]
