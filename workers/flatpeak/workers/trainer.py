"""One rank of the training loop, without Ray: build, attach to the arenas, step.

A trainer is stateless between steps: weights come from the arenas, gradients go there. The
controller drives it; every rank calls the same methods in the same order.
"""

import math
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flatpeak.workers import progress
from flatpeak.workers.arena import SUFFIX, Arena
from flatpeak.workers.batches import Microbatch, SampleSource, read_step
from flatpeak.workers.boundaries import (
    BOUNDARIES,
    BoundaryStats,
    CheckpointOffload,
    device_bytes,
    slab_bytes,
)
from flatpeak.workers.buckets import Bucket, Shard
from flatpeak.workers.checkpoint import build_meta_model, load_config
from flatpeak.workers.device_update import DeviceUpdate, Slots, Target
from flatpeak.workers.dispatch import DispatchReport
from flatpeak.workers.gradients import GradientStream, global_norm
from flatpeak.workers.host_memory import HostMemory, host_memory, node_path
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.model import LocalParameter, ShardedModel, shard_model
from flatpeak.workers.parallel import Layout, make_groups
from flatpeak.workers.progress import waiting
from flatpeak.workers.refresh import RefreshReport, WeightRefresh
from flatpeak.workers.remote import RemoteArena
from flatpeak.workers.routers import auxiliary_coefficient, watch_routers
from flatpeak.workers.settings import adamw_of, dispatch_of, samples_of, tokens_of
from flatpeak.workers.streams import streams_of
from flatpeak.workers.tied_head import TiedGradient

if TYPE_CHECKING:
    from flatpeak.controller.spec import Spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one rank reports of a step. Loss, norm, counts are of all ranks and equal on each.

    The loss is all that is minimised: with z-loss, label smoothing and load balancing where the job
    asks for them. `nll`, the mean negative log likelihood of the targets, is without.
    """

    step: int
    loss: float
    nll: float = math.nan
    grad_norm: float
    targets: int
    tokens: int
    seconds: float
    dispatch: DispatchReport
    refresh: RefreshReport
    boundaries: BoundaryStats
    sent_bytes: int = 0
    """To optimizer actors of other nodes, and `received_bytes` from them."""
    received_bytes: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    """Most bytes of device memory, by component, of those that depend on the job alone."""
    live_bytes: int = 0
    """Device memory in use at the end of the step."""
    host: HostMemory = field(default_factory=HostMemory)
    waited_s: float | None = None
    """Time for which this rank stood still for its peers. None on CUDA, where the device does."""
    largest: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether the step may change the weights."""
        return self.targets > 0 and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class SlabRegion:
    """Where a rank keeps its boundaries: bytes [offset, offset + nbytes) of an arena's slab, or of
    one of its own where there is no arena on its node."""

    arena: int | None
    offset: int
    nbytes: int


class Trainer:
    """A rank of `spec`. The default process group is initialised before `build`."""

    def __init__(self, spec: "Spec", *, rank: int, device: torch.device) -> None:
        self.spec, self.rank, self.device = spec, rank, device
        self.sharded: ShardedModel
        self.source: SampleSource
        self._stream: GradientStream
        self._refresh: WeightRefresh
        self._offload: CheckpointOffload
        self._boundaries = BoundaryStats()
        self._accumulate, self._final = False, True
        self._reduced: Tensor | None = None
        self._device_update: DeviceUpdate | None = None
        self._slab: Arena  # kept: with the last reference its registration ends
        self._slab_bytes = 0
        self._staging: dict[str, int] = {}
        self._remote: Mapping[int, RemoteArena] = {}
        self._tied: dict[int, TiedGradient] = {}
        self._meter = PeakMeter(device=device) if spec.metrics.peaks else None

    def build(self) -> tuple[Shard, ...]:
        """Makes this rank's share of the model and opens the data. Collective over the world.

        Returns the shards that this rank alone writes gradients for, in order of first use.
        """
        spec = self.spec
        self.source = self.open_samples()
        config = load_config(path=spec.model.path, config=spec.model.config)
        layout = Layout(
            world=spec.cluster.workers,
            sequence=_degree(spec.parallel.sequence),
            expert=_degree(spec.parallel.expert),
            vocabulary=_degree(spec.parallel.vocabulary),
        )
        timeout = timedelta(seconds=spec.cluster.peer_timeout_s)
        self.sharded = shard_model(
            build_meta_model(config),
            groups=make_groups(layout, self.rank, timeout=timeout),
            mesh=init_device_mesh(self.device.type, (layout.world,)),
            device=self.device,
            dtype=DTYPES[spec.train.dtype],
            dispatch=dispatch_of(spec),
        )
        head, vocabulary = self.sharded.head, spec.memory.vocabulary
        head.token_tile = None if vocabulary.token_tile == "auto" else vocabulary.token_tile
        head.schedule = vocabulary.schedule
        head.z_loss, head.label_smoothing = spec.train.z_loss, spec.train.label_smoothing
        self._coefficient = auxiliary_coefficient(config, spec.train.router_aux_loss_coef)
        if self._coefficient:
            watch_routers(self.sharded.model, self.sharded.load)
        self._hook_gradients()
        return tuple(parameter.shard(self.rank) for parameter in self.sharded.parameters)

    def slab_bytes(self) -> int:
        """Host bytes that the boundaries of one microbatch of this rank take."""
        train, budget = self.spec.train, self.spec.memory.boundaries
        if not budget.offload:
            return 0
        model = self.sharded.model
        needed = slab_bytes(
            tokens=tokens_of(self.spec),
            hidden=model.config.hidden_size,
            dtype=DTYPES[train.dtype],
            layers=model.config.num_hidden_layers,
        )
        return (
            needed if budget.host_budget_bytes == "auto" else min(needed, budget.host_budget_bytes)
        )

    def attach(
        self,
        buckets: tuple[Bucket, ...],
        arenas: dict[int, str],
        slab: SlabRegion,
        *,
        remote: Mapping[int, RemoteArena] = MappingProxyType({}),
    ) -> None:
        """Maps the arenas (number to path) that hold this rank's buckets and its boundary slab.

        Buckets of the arenas in `remote` are reached through that.
        """
        own = tuple(bucket for bucket in buckets if bucket.rank == self.rank)
        used = {bucket.arena for bucket in own} - remote.keys() | {slab.arena}
        mapped = {
            number: Arena.attach(path, run=self.spec.run)
            for number, path in arenas.items()
            if number in used
        }
        for arena in mapped.values():
            arena.own(rank=self.rank, timeout_s=self.spec.cluster.peer_timeout_s)
        boundaries = self._own_arena(slab) if slab.arena is None else mapped[slab.arena]
        if self.device.type == "cuda":
            for arena in {*mapped.values(), boundaries}:
                arena.register()
        self._slab, self._slab_bytes, self._remote = boundaries, slab.nbytes, remote
        self._stream = GradientStream(own, mapped | dict(remote))
        self._device_update = self._make_device_update(own, mapped)
        self._refresh = WeightRefresh(
            self.sharded,
            self._stream,
            timeout_s=self.spec.cluster.peer_timeout_s,
            in_place=self._device_update and self._device_update.in_place,
        )
        region = boundaries.slab()[slab.offset : slab.offset + slab.nbytes]
        self._offload = CheckpointOffload(region, host_budget=slab.nbytes)
        self.sharded.model._set_gradient_checkpointing(
            True, gradient_checkpointing_func=self._offload.checkpoint
        )
        if self._meter is not None:
            for parameter in self.sharded.parameters:
                self._meter.track(parameter.tensor, "weights")

    def _own_arena(self, slab: SlabRegion) -> Arena:
        """One for this rank's boundaries alone, which goes with this process."""
        name = f"flatpeak-{self.spec.run}-worker-{self.rank}-{secrets.token_hex(4)}{SUFFIX}"
        arena = Arena.create(
            node_path(self.spec.cluster.shm_dir) / name,
            run=self.spec.run,
            buckets=(),
            spare_frames=1,
            slab_bytes=slab.offset + slab.nbytes,
        )
        arena.unlink()  # mapped, it needs no name, and nothing can be left behind
        return arena

    def _planned_peaks(self) -> dict[str, int]:
        config = self.sharded.model.config
        boundaries = device_bytes(
            tokens_of(self.spec),
            config.hidden_size,
            DTYPES[self.spec.train.dtype],
            config.num_hidden_layers,
            capacity=self._slab_bytes,
        )
        return {BOUNDARIES: boundaries} | self._staging

    def _make_device_update(
        self, own: Sequence[Bucket], arenas: Mapping[int, Arena]
    ) -> DeviceUpdate | None:
        buckets = [bucket for bucket in own if bucket.updater is not None]
        if not buckets:
            return None
        slots = Slots(self.spec.memory.optimizer.slots, buckets, self.device)
        self._staging = {"optimizer": slots.state.nbytes + slots.weights.nbytes}
        if self._meter is not None:
            for staging in (slots.state, slots.weights):
                self._meter.track(staging, "optimizer")
        return DeviceUpdate(
            buckets,
            arenas,
            adamw_of(self.spec),
            slots=slots,
            streams=streams_of(self.device),
            targets={p.name: Target(p.start, p.flat) for p in self.sharded.parameters},
        )

    def update(self, step: int, *, lr: float, clip_factor: float | None) -> None:
        """Begins to apply `step` to what is updated on this rank's device, and returns at once.

        The next step waits for each weight, and raises what the update raised.
        """
        if self._device_update is not None:
            self._device_update.start(step, lr=lr, clip_factor=clip_factor)

    def finish_update(self) -> None:
        """Returns when what `update` began has ended; raises what it raised."""
        if self._device_update is not None:
            self._device_update.join()

    def step(self, step: int) -> StepResult:
        """Forward and backward of `step` (from 1) on the weights that step - 1 left.

        Collective over the world. The gradients are in the arenas when it returns; whether and how
        they are applied is the controller's decision.
        """
        started, waited = time.perf_counter(), progress.waited_s()
        progress.begin(step)
        with self._metered():
            if self._meter is not None:
                self._meter.reset_peaks()
            sent, received = self._traffic()
            self._refresh.begin(version=step - 1)
            self._stream.begin_step(version=step - 1, timeout_s=self.spec.cluster.peer_timeout_s)
            self.sharded.load.begin_step()
            self.sharded.dispatched.begin_step()
            (loss, nll), targets, tokens = self._forward_backward(step)
            progress.enter("end")
            refreshed = self._refresh.finish()
            grad_norm = self._finish_gradients()
            now_sent, now_received = self._traffic()
        progress.enter(progress.IDLE)
        return StepResult(
            step=step,
            loss=loss,
            nll=nll,
            grad_norm=grad_norm,
            targets=targets,
            tokens=tokens,
            seconds=time.perf_counter() - started,
            dispatch=self.sharded.dispatched.report,
            refresh=refreshed,
            boundaries=self._boundaries,
            sent_bytes=now_sent - sent,
            received_bytes=now_received - received,
            peaks=self._meter.peaks() if self._meter else {},
            planned=self._planned_peaks(),
            live_bytes=self._meter.live()[TOTAL] if self._meter else 0,
            host=host_memory(),
            waited_s=progress.waited_s() - waited if self._on_cpu() else None,
            largest=self._meter.largest_tensors() if self._meter and self._on_cpu() else {},
        )

    def _traffic(self) -> tuple[int, int]:
        arenas = self._remote.values()
        return sum(a.sent_bytes for a in arenas), sum(a.received_bytes for a in arenas)

    def open_samples(self) -> SampleSource:
        return samples_of(self.spec)

    def _forward_backward(self, step: int) -> tuple[list[float], int, int]:
        """Loss and nll, targets and tokens of the step on all ranks."""
        train, load = self.spec.train, self.sharded.load
        progress.enter("reading samples")
        batches = list(
            read_step(
                self.source,
                step=step,
                sequences=train.sequences_per_step,
                microbatches=train.microbatches,
                groups=self.sharded.groups,
                device=self.device,
            )
        )
        targets, tokens = self._global_counts(batches)
        self._seed(step)
        # The auxiliary loss multiplies means over the whole step, so with several microbatches the
        # routes are counted in a pass of their own before the first backward.
        count_first = bool(self._coefficient) and len(batches) > 1
        if count_first:
            with torch.no_grad():
                for batch in batches:
                    self._run(batch, with_targets=False)
            load.finish_counting()
            self._seed(step)  # a router with noise must choose the same routes again
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._boundaries = BoundaryStats()
        for index, batch in enumerate(batches):
            self._accumulate, self._final = index > 0, index == len(batches) - 1
            progress.enter("forward")
            with self._offload:
                losses = self._run(batch, with_targets=True)
                assert losses is not None
                loss = losses.sum() / max(targets, 1)
                nll, kept = loss.detach(), self.sharded.head.nll
                if self._coefficient:
                    if not count_first:
                        load.finish_counting()
                    loss = loss + load.auxiliary_loss(self._coefficient, tokens=tokens)
                total[0] += loss.detach()
                total[1] += nll if kept is None else kept / max(targets, 1)
                del losses
                progress.enter("backward")
                loss.backward()
                # The graph's nodes, and what they hold beside tensors, end with the last reference.
                del loss
            self._boundaries = self._boundaries.including(self._offload.stats())
        if not self._coefficient:
            load.finish_counting()
        with waiting():
            dist.all_reduce(total)
        return total.tolist(), targets, tokens

    def _seed(self, step: int) -> None:
        """Makes what a router draws a function of the job, the step and the rank alone."""
        mixed = (self.spec.train.seed * 1_000_003 + step) * 65_537 + self.rank
        torch.manual_seed(mixed % 2**63)

    def _run(self, batch: Microbatch, *, with_targets: bool) -> Tensor | None:
        self.sharded.sequence.boundaries = batch.boundaries
        self.sharded.load.begin_microbatch()
        targets = batch.targets if with_targets else None
        return self.sharded.forward(batch.inputs, batch.positions, targets)

    def _global_counts(self, batches: list[Microbatch]) -> tuple[int, int]:
        """Targets and tokens of the step over all ranks."""
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for batch in batches:
            counts[0] += (batch.targets != -100).sum()
            counts[1] += batch.tokens
        with waiting():
            dist.all_reduce(counts)
        targets, tokens = counts.tolist()
        return targets, tokens

    def _hook_gradients(self) -> None:
        # The hooks of a tensor are out of the garbage collector's sight: one that held the trainer
        # would keep it, its groups and their threads alive for ever.
        trainer = weakref.proxy(self)
        self._local = {
            id(entry.parameter): entry
            for entry in self.sharded.parameters
            if entry.parameter is not None
        }
        for module in self.sharded.fsdp_modules():
            module.set_all_reduce_hook(lambda reduced: trainer._keep_reduced(reduced))
        for entry in self.sharded.parameters:
            if isinstance(entry.parameter, DTensor):
                entry.parameter.register_post_accumulate_grad_hook(
                    lambda parameter: trainer._take_dense(parameter)
                )
        for context in self.sharded.experts:
            context.sink = self._take_local
        head = self.sharded.head
        if head.tied:
            layout = self.sharded.groups.layout
            tied = TiedGradient(vocab_size=head.vocab_size, layout=layout, rank=self.rank)
            self._tied[id(head.weight)], head.sink = tied, tied.take
        else:
            head.sink = lambda grad: self._take_local(head.weight, grad)

    def _keep_reduced(self, reduced: Tensor) -> None:
        self._reduced = reduced

    def _take_dense(self, parameter: nn.Parameter) -> None:
        """Hands on what FSDP2 has just reduced; it calls this layer by layer in backward."""
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        assert self._reduced is not None
        parameter.grad = None  # free the shard at once
        # `.grad` is a view of the group's reduced buffer, rounded to the parameter's dtype. The
        # buffer itself, kept just before, holds the fp32 sums at the same place.
        rounded = grad._local_tensor
        exact = self._reduced.as_strided(rounded.shape, rounded.stride(), rounded.storage_offset())
        if (tied := self._tied.get(id(parameter))) is not None:
            tied.add_to(exact)
        self._write(self._local[id(parameter)], exact)

    def _take_local(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Hands on the fp32 gradient of experts or of an untied head."""
        self._write(self._local[id(parameter)], grad)

    def _write(self, parameter: LocalParameter, grad: Tensor) -> None:
        """Hands the part of a local gradient that this rank owns to its buckets."""
        if parameter.axis is not None and parameter.axis.replica_group is not None:
            # Replicas saw other tokens. They run the same layers in the same order, so their
            # reductions match up.
            with waiting():
                dist.all_reduce(grad, group=parameter.axis.replica_group)
        own = grad.reshape(-1)[
            parameter.own_start - parameter.start : parameter.own_stop - parameter.start
        ]
        self._stream.write(
            parameter.name, parameter.own_start, own, accumulate=self._accumulate, final=self._final
        )

    def _finish_gradients(self) -> float:
        if self.spec.train.router_bias_update_rate:
            self._write_router_biases()
        self._stream.finish()
        self._reduced = None
        return global_norm(self._stream.squared_norm())

    def _write_router_biases(self) -> None:
        layer_of = {
            name.rsplit(".", 1)[0]: index for index, name in enumerate(self.sharded.moe_names)
        }
        self._accumulate, self._final = False, True
        for parameter in self.sharded.parameters:
            if parameter.rule == "bias":
                block = parameter.name.rsplit(".", 2)[0]
                self._write(parameter, self.sharded.load.bias_gradient(layer_of[block]))

    def _metered(self) -> AbstractContextManager[object]:
        return self._meter if self._meter is not None else nullcontext()

    def _on_cpu(self) -> bool:
        return self.device.type == "cpu"


def _degree(value: "int | str") -> int:
    assert isinstance(value, int), "degrees are resolved before workers are placed"
    return value
