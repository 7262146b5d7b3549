"""Each step's weights come from the arenas when the forward pass reaches the layer that uses them.

The optimizer actors update buckets in the order of first use, so the forward pass of the next step
runs beside the update: a layer waits for its own weights alone.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from flatpeak.workers.gradients import GradientStream
from flatpeak.workers.model import LocalParameter, ShardedModel
from flatpeak.workers.partition import parts
from flatpeak.workers.support import decoder_of


@dataclass(frozen=True)
class RefreshReport:
    """How one step's weights came to this rank."""

    buckets: int = 0
    overlapped_buckets: int = 0
    """Of them, those that were not yet updated when the first layer had its weights."""
    exposed_s: float = 0.0
    """Seconds that the forward pass stood still for weights: waiting, and copying them."""


class WeightRefresh:
    """Brings the weights of `sharded` out of `stream`, module by module, before each is called.

    `begin` opens a step, `finish` closes it. All ranks call the modules in the same order, so the
    broadcasts among replicas, which are collective, meet each other.
    """

    def __init__(self, sharded: ShardedModel, stream: GradientStream, *, timeout_s: float) -> None:
        self.report = RefreshReport()
        self._sharded, self._stream, self._timeout_s = sharded, stream, timeout_s
        self._version = -1
        self._due: dict[nn.Module, list[LocalParameter]] = {}
        self._users = _first_users(sharded)
        device = sharded.parameters[0].tensor.device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A module must not keep the trainer's arenas mapped once it is done with them.
        refresh = weakref.proxy(self)
        for module in self._users:
            # Before the hook of FSDP2, which gathers the shards.
            module.register_forward_pre_hook(lambda called, _: refresh._bring(called), prepend=True)

    def begin(self, *, version: int) -> None:
        """From now on the modules wait for the weights of `version`."""
        for module in self._sharded.fsdp_modules():
            module.reshard()  # a gathered copy would hide the refreshed shard
        self._version, self._due = version, dict(self._users)
        self.report = RefreshReport(buckets=self._stream.buckets)

    def finish(self) -> RefreshReport:
        """Brings what the forward pass did not use. Collective over replica groups."""
        for module in list(self._due):
            self._bring(module)
        return self.report

    @torch.no_grad()
    def _bring(self, module: nn.Module) -> None:
        # Later microbatches, and layers that recompute, find the weights in place.
        parameters = self._due.pop(module, None)
        if parameters is None:
            return
        first = len(self._due) == len(self._users) - 1
        began = time.perf_counter()
        with self._beside_computation():
            for parameter in parameters:
                start, stop = parameter.own_start, parameter.own_stop
                own = parameter.flat[start - parameter.start : stop - parameter.start]
                self._stream.fetch(
                    parameter.name, start, own, version=self._version, timeout_s=self._timeout_s
                )
        for parameter in parameters:
            _share_with_replicas(parameter)
        was, seconds = self.report, time.perf_counter() - began
        self.report = RefreshReport(
            was.buckets,
            self._stream.buckets_before(self._version) if first else was.overlapped_buckets,
            was.exposed_s + seconds,
        )

    def _beside_computation(self) -> AbstractContextManager[object]:
        # A copy blocks the host until it is there, so whatever is issued later finds the weights,
        # FSDP2's own streams too. On a stream of its own it does not wait for earlier layers.
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)


def _first_users(sharded: ShardedModel) -> dict[nn.Module, list[LocalParameter]]:
    """The parameters by the module whose call needs them first, in the order of the calls."""
    model = sharded.model
    decoder = decoder_of(model)
    prefixes: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    modules = [model.get_input_embeddings(), *decoder.layers, decoder.norm, sharded.head]
    users: dict[nn.Module, list[LocalParameter]] = {module: [] for module in (model, *modules)}
    owner = {prefixes[module]: module for module in modules}
    if sharded.head.tied:
        # One group of FSDP2: they are gathered together, for the embedding.
        owner |= {prefixes[module]: modules[0] for module in (decoder.norm, sharded.head)}
    for parameter in sharded.parameters:
        # What belongs to none of them comes before the first.
        users[
            next((owner[name] for name in _above(parameter.name) if name in owner), model)
        ].append(parameter)
    return {module: parameters for module, parameters in users.items() if parameters}


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


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
