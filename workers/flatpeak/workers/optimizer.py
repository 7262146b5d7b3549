"""AdamW over the buckets of arenas.

`update_bucket` is the one place with the maths. `OptimizerCore` is an optimizer actor without Ray;
`OffloadStreamAdamW` is it and the worker's side (`gradients.GradientStream`) in one process,
behind torch's optimizer interface.
"""

import math
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatpeak.kernels.adamw import Coefficients, adamw
from flatpeak.workers import progress
from flatpeak.workers.arena import SUFFIX, Arena, Frame, remove_stale
from flatpeak.workers.buckets import Bucket, BucketIndex, Range, Shard, cut_buckets
from flatpeak.workers.device_update import DeviceUpdate, Slots, Target
from flatpeak.workers.errors import CheckpointError, InputError, RunFailed
from flatpeak.workers.gradients import GradientStream, clipping_factor, global_norm
from flatpeak.workers.optimizer_options import (
    check_arena,
    check_clip,
    check_count,
    check_group,
    check_parameters,
    check_state,
    local_part,
)
from flatpeak.workers.streams import streams_of
from flatpeak.workers.update_rates import measure_device_rates, measure_host_rate
from flatpeak.workers.update_split import UPDATE_ON, assign_updates, split_updates


@dataclass(frozen=True)
class AdamW:
    """What stays the same over a run. `lr_bias` is the rate of rule "bias"."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    lr_bias: float = 1e-3


def update_bucket(
    arena: Arena, i: int, *, step: int, lr: float, clip_factor: float, settings: AdamW
) -> None:
    """Write the bucket's next version from its gradient region and flip to it as version `step`.

    Rule "adamw" is `torch.optim.AdamW`, see `flatpeak.kernels.adamw`. The number of updates, not
    the step, enters the bias correction, since a skipped step leaves the moments alone. Decay
    applies to buckets that say so. Rule "bias" is `master -= lr_bias * gradient`: neither moments
    nor clipping nor decay.

    Gradients and the current frame are only read: an update cut off half-way can be done again.
    """
    bucket = arena.bucket(i)
    old, new, gradient = arena.frame(i), arena.begin_update(i), arena.gradient(i)
    if bucket.rule == "bias":
        torch.add(old.master, gradient, alpha=-settings.lr_bias, out=new.master)
        new.exp_avg.copy_(old.exp_avg)
        new.exp_avg_sq.copy_(old.exp_avg_sq)
        new.weights.copy_(new.master)
    else:
        coefficients = Coefficients.of(
            updates=arena.updates(i) + 1,
            lr=lr,
            betas=settings.betas,
            eps=settings.eps,
            decay=settings.weight_decay if bucket.decay else 0.0,
            clip_factor=clip_factor,
        )
        weights = None if new.weights is new.master else new.weights
        adamw(*old.state, gradient, *new.state, weights, coefficients)
    arena.commit_update(i, step)


@dataclass
class Counters:
    """Since the start of the process."""

    updated_steps: int = 0
    skipped_steps: int = 0
    updated_buckets: int = 0
    updated_parameters: int = 0
    update_s: float = 0.0


class OptimizerCore:
    """What an optimizer actor does with the arenas it owns. The caller sets torch's number of
    threads.

    Fresh arenas get masters by `load` (in pieces) or `load_gradients`, then `commit_load`. Attached
    ones go on where their last process stopped, also in the middle of an update. `buckets` limits
    it to some of the arenas'. `counters` are those of a core that this one follows. `alone` it
    updates what workers would update on their devices, too.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        settings: AdamW,
        *,
        buckets: Sequence[Bucket] | None = None,
        counters: Counters | None = None,
        alone: bool = False,
    ) -> None:
        self.arenas, self.settings = tuple(arenas), settings
        self.counters = counters or Counters()
        self._home = {bucket.index: arena for arena in arenas for bucket in arena.buckets}
        chosen = [b for arena in arenas for b in arena.buckets] if buckets is None else buckets
        # Over all arenas, so that an update keeps the order in which the forward needs them.
        self.buckets = sorted(chosen, key=lambda bucket: bucket.index)
        self._updated = [b for b in self.buckets if alone or b.updater is None]
        self._index = BucketIndex(self.buckets)

    @property
    def step(self) -> int:
        """The last committed step; -1 until `commit_load`, and always without buckets."""
        return min(map(self.version, self.buckets), default=-1)

    def version(self, bucket: Bucket) -> int:
        return self._home[bucket.index].version(bucket.index)

    def load(
        self,
        held: Range,
        master: Tensor,
        exp_avg: Tensor | None = None,
        exp_avg_sq: Tensor | None = None,
    ) -> None:
        """Set the state of elements `held`, each tensor [held.size] of any float dtype.

        Moments that are not given stay as they are: zero in a fresh arena. Weights follow their
        master. Between steps only: it changes the current version in place.
        """
        for frame, inner, outer in self._places(held):
            frame.master[inner].copy_(master[outer])
            frame.weights[inner].copy_(frame.master[inner])
            for moment, values in ((frame.exp_avg, exp_avg), (frame.exp_avg_sq, exp_avg_sq)):
                if values is not None:
                    moment[inner].copy_(values[outer])

    def load_gradients(self) -> None:
        """Take what workers wrote into the gradient regions as masters.

        Their `GradientStream.finish` must have returned 0: what was not written would load as 0.
        """
        for bucket in self.buckets:
            arena = self._home[bucket.index]
            frame = arena.frame(bucket.index)
            frame.master.copy_(arena.gradient(bucket.index))
            frame.weights.copy_(frame.master)

    @property
    def updates(self) -> int:
        """How many updates the state has seen: committed steps less skipped ones."""
        return max((self._home[b.index].updates(b.index) for b in self.buckets), default=0)

    def read(self, held: Range) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of master, exp_avg and exp_avg_sq, each [held.size], of elements `held`."""
        copies = torch.empty(held.size), torch.empty(held.size), torch.empty(held.size)
        for frame, inner, outer in self._places(held):
            for copy, part in zip(copies, frame.state, strict=True):
                copy[outer] = part[inner]
        return copies

    def holds(self, held: Range, weights: Tensor) -> bool:
        """Whether the weights of elements `held` are `weights` [held.size], on any device."""
        return all(
            torch.equal(frame.weights[inner], weights[outer].cpu())
            for frame, inner, outer in self._places(held)
        )

    def _places(self, held: Range) -> Iterator[tuple[Frame, slice, slice]]:
        """Where the elements of `held` lie: (frame, place there, place within `held`)."""
        for piece in self._index.pieces(held.name, held.start, held.stop):
            size = piece.stop - piece.start
            start = piece.start - held.start
            frame = self._home[piece.bucket.index].frame(piece.bucket.index)
            yield frame, slice(piece.offset, piece.offset + size), slice(start, start + size)

    def commit_load(self, step: int, *, updates: int | None = None) -> None:
        """Let all buckets be version `step`, after `updates` updates (default: `step`)."""
        count = step if updates is None else updates
        for bucket in self.buckets:
            self._home[bucket.index].advance(bucket.index, step, updates=count)

    def update(self, step: int, *, lr: float, clip_factor: float | None) -> None:
        """Bring buckets to version `step`, in the order in which the next forward needs them.

        All that are updated on the host: workers do the others. Without a finite `clip_factor` the
        step is skipped: state stays to the bit, and only versions move on, so that waiting workers
        do. Raises `RunFailed` for a step that is not the next; one that was cut off by this
        process' predecessor is finished, bucket by bucket.
        """
        self._check_next(step)
        factor = clip_factor if clip_factor is not None and math.isfinite(clip_factor) else None
        start = time.perf_counter()
        for bucket in self._updated:
            progress.enter("update")
            if self.version(bucket) == step:
                continue  # updated before this process took over
            if factor is None:
                self._home[bucket.index].advance(bucket.index, step)
            else:
                self._update_bucket(bucket, step, lr, factor)
        self.counters.update_s += time.perf_counter() - start
        self.counters.updated_steps += factor is not None
        self.counters.skipped_steps += factor is None

    def finish(self, step: int, *, lr: float, clip_factor: float | None) -> None:
        """`update` by a process that took over: all of it may have been done already."""
        if any(self.version(bucket) != step for bucket in self._updated):
            self.update(step, lr=lr, clip_factor=clip_factor)

    def wait_for_workers(self, step: int, *, timeout_s: float) -> None:
        """Return when `step` is committed: all buckets have it. Raises `WaitTimeout`."""
        with progress.waiting("the workers' part"):
            for bucket in self.buckets:
                self._home[bucket.index].wait_version(bucket.index, step, timeout_s=timeout_s)

    def _update_bucket(self, bucket: Bucket, step: int, lr: float, clip_factor: float) -> None:
        update_bucket(
            self._home[bucket.index],
            bucket.index,
            step=step,
            lr=lr,
            clip_factor=clip_factor,
            settings=self.settings,
        )
        self.counters.updated_buckets += 1
        self.counters.updated_parameters += bucket.size

    def _check_next(self, step: int) -> None:
        if not self._updated:
            return
        last = min(self._updated, key=self.version)
        committed, path = self.version(last), self._home[last.index].path
        if committed < 0:
            raise RunFailed(f"step {step} was asked of {path} before it was loaded")
        if step != committed + 1:
            raise RunFailed(
                f"step {step} was asked of {path}, which has committed step "
                f"{committed}: a step is applied once and none is left out"
            )


class OffloadStreamAdamW(torch.optim.Optimizer):
    """AdamW with masters, moments and gradients in an arena, for any torch script; no Ray.

    For fp32 parameters it computes what `torch.optim.AdamW` does with `fused=True`; bf16 ones get
    fp32 masters. Takes parameters, (name, parameter) pairs or groups as torch's optimizers do, and
    learning rate schedulers work on it. Of sharded parameters (DTensor) it handles the local part.
    Parameters that need no gradient when it is made are left alone.

    Each gradient moves to the arena as soon as backward has accumulated it, and `.grad` is freed;
    several backward passes add up in fp32, and `zero_grad` drops them. So
    `torch.nn.utils.clip_grad_norm_` before `step` finds no gradients and silently does nothing:
    clip with `step(clip=...)`. A parameter without a gradient in a step has gradient zero, where
    torch skips it: its moments decay, and they and weight decay still move it. Parameters loaded or
    changed between steps take their masters along.

    `arena` is the file to use (ending in .arena), or None for a nameless one in /dev/shm. `slots`
    is the number of spare frames of `bucket_parameters` elements that updates are written to.

    Updates run on the host, or where the parameters are with `update_on` "device": `slots` buckets
    pass through it at once, 18 bytes a parameter of them. "auto" divides the buckets by measured
    rates so that both sides finish together; on a CPU it is "host". The state lies in the arena
    either way, and nothing else changes; the result too stays to the bit on a CPU.

    Raises `InputError` for arguments that cannot work, and for parameters that another living
    optimizer of this class holds: the two would take each other's gradients.
    """

    def __init__(
        self,
        params: Any,
        *,
        arena: str | Path | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bucket_parameters: int = 4_194_304,
        slots: int = 2,
        update_on: str = "host",
    ) -> None:
        if update_on not in UPDATE_ON:
            raise InputError(
                f"update_on: {update_on} is not known; use one of {', '.join(UPDATE_ON)}"
            )
        check_arena(arena)
        check_count("slots", slots, 2)
        check_count("bucket_parameters", bucket_parameters, 4_194_304)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_group(defaults)
        self._held: dict[Tensor, Range] = {}
        super().__init__(params, defaults)
        for number, options in enumerate(self.param_groups):
            where = f"parameter group {number}: "
            check_group(options, where)
            check_parameters(options["params"], where)
            _check_free(options["params"], number)
        # Buckets of two ranks never mix; here a parameter group plays the part of a rank, so that
        # each bucket has one learning rate.
        shards = [
            Shard(self._hold(p), number, str(p.dtype).removeprefix("torch."), decay=True)
            for number, group in enumerate(self.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
        buckets = cut_buckets(
            shards, bucket_parameters=bucket_parameters, arenas_of_rank=lambda rank: [0]
        )
        device = self._device()
        buckets = _divided(buckets, update_on, device, slots)
        self._arena = _open_arena(arena, buckets, slots)
        self._stream = GradientStream(buckets, {0: self._arena})
        self._cores = [
            OptimizerCore([self._arena], AdamW(), buckets=[b for b in buckets if b.rank == number])
            for number in range(len(self.param_groups))
        ]
        self._on_device = self._device_updates(buckets, device, slots)
        self._on_host = {r.name for b in buckets if b.updater is None for r in b.ranges}
        self._follow_parameters()
        self._version = 0
        for core in self._cores:
            core.commit_load(self._version)
        take = _Taker(self)
        self._hooks = [p.register_post_accumulate_grad_hook(take) for p in self._held]
        self.zero_grad()

    @property
    def skipped_steps(self) -> int:
        return self._cores[0].counters.skipped_steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._held:
            raise InputError("the buckets are cut: give all parameter groups to the constructor")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._stream.begin_step(version=self._version, timeout_s=0.0)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, clip: float | None = None, *, group: dist.ProcessGroup | None = None
    ) -> float:
        """Update with gradients scaled down to a global norm of `clip`; returns the norm before.

        With `group`, its ranks hold different shards and the norm is taken over all of them. A
        norm that is not finite skips the step: nothing changes but `skipped_steps`. Raises
        `InputError` for a closure, a `clip` that is no number above 0, and options of a group that
        cannot work; it changes nothing then.
        """
        clip = check_clip(clip)
        self._check_groups(self.param_groups)
        for p in self._held:
            self._take_gradient(p)
        self._stream.finish()
        squared = self._stream.squared_norm()
        norm = math.sqrt(squared.item()) if group is None else global_norm(squared, group)
        self._follow_parameters()
        self._version += 1
        factor = clipping_factor(norm, clip)
        targets = self._targets() if self._on_device else {}
        for number, (core, options) in enumerate(zip(self._cores, self.param_groups, strict=True)):
            core.settings = AdamW(tuple(options["betas"]), options["eps"], options["weight_decay"])
            beside = self._on_device.get(number)
            if beside is not None:
                beside.settings, beside.targets = core.settings, targets
                beside.start(self._version, lr=float(options["lr"]), clip_factor=factor)
            core.update(self._version, lr=float(options["lr"]), clip_factor=factor)
            if beside is not None:
                beside.join()
        if factor is not None:
            self._refresh_parameters(done=targets.keys() - self._on_host)
        self.zero_grad()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """As of `torch.optim.AdamW`, with each parameter's fp32 `master` [shape] beside it."""
        packed = super().state_dict()
        packed["state"] = {
            number: self._core_state(core, p)
            for number, (core, p) in enumerate(self._parameters())
            if p in self._held
        }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()` of this class or of `torch.optim.AdamW`.

        Load the model's weights as well, before or after: a master whose rounding is not the
        parameter gives way to it.
        """
        state = state_dict["state"]
        # All of it before any of it is taken over.
        for number, (_, p) in enumerate(self._parameters()):
            if p in self._held and number in state:
                check_state(number, state[number], p)
        self._check_groups(state_dict["param_groups"])
        updates = {int(entry["step"]) for entry in state.values()}
        if len(updates) > 1:
            raise CheckpointError(
                f"parameters were updated {sorted(updates)} times; they can only go on together"
            )
        super().load_state_dict({**state_dict, "state": {}})
        for number, (core, p) in enumerate(self._parameters()):
            if p in self._held:
                # What never was updated has no state in torch: its moments are zero.
                nothing = torch.zeros(local_part(p).shape)
                entry = state.get(number, {"exp_avg": nothing, "exp_avg_sq": nothing})
                values = (entry.get("master", p), entry["exp_avg"], entry["exp_avg_sq"])
                core.load(self._held[p], *(local_part(value).reshape(-1) for value in values))
        for core in self._cores:
            core.commit_load(self._version, updates=max(updates, default=0))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "an OffloadStreamAdamW cannot be copied or pickled, its state is in an arena; make "
            "another one and give it this one's state_dict()"
        )

    def close(self) -> None:
        """Leave the parameters alone from now on, and remove the arena."""
        for hook in self._hooks:
            hook.remove()
        self._arena.unlink()
        self._arena.close()

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for number, options in enumerate(groups):
            check_group(options, f"parameter group {number}: ")

    def _parameters(self) -> Iterator[tuple[OptimizerCore, Tensor]]:
        for core, group in zip(self._cores, self.param_groups, strict=True):
            for p in group["params"]:
                yield core, p

    def _hold(self, p: Tensor) -> Range:
        held = self._held[p] = Range(str(len(self._held)), 0, local_part(p).numel())
        return held

    def _take_gradient(self, p: Tensor) -> None:
        if p.grad is not None:
            if p.grad.layout != torch.strided:
                raise InputError(
                    f"a parameter of shape {list(p.shape)} has a gradient of layout "
                    f"{p.grad.layout}; make it dense, e.g. with nn.Embedding(..., sparse=False)"
                )
            gradient = local_part(p.grad).reshape(-1)
            self._stream.write(self._held[p].name, 0, gradient, accumulate=True)
            p.grad = None

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Take over parameters that are not what the last update made them."""
        for core, p in self._parameters():
            if p in self._held:
                weights = local_part(p).reshape(-1)
                if not core.holds(self._held[p], weights):
                    core.load(self._held[p], weights)

    def _device(self) -> torch.device:
        """Where the parameters are."""
        devices = {local_part(p).device for p in self._held}
        if len(devices) > 1:
            raise InputError(
                f"the parameters are on {', '.join(sorted(map(str, devices)))}; "
                "give each device an optimizer of its own"
            )
        return next(iter(devices), torch.device("cpu"))

    def _device_updates(
        self, buckets: Sequence[Bucket], device: torch.device, count: int
    ) -> dict[int, DeviceUpdate]:
        """Of each group that has buckets on the device."""
        own = [bucket for bucket in buckets if bucket.updater is not None]
        if not own:
            return {}
        if device.type == "cuda":
            self._arena.register()
        slots = Slots(count, own, device)
        streams = streams_of(device)
        return {
            number: DeviceUpdate(
                [bucket for bucket in own if bucket.rank == number],
                {0: self._arena},
                AdamW(),
                slots=slots,
                streams=streams,
            )
            for number in sorted({bucket.rank for bucket in own})
        }

    def _targets(self) -> dict[str, Target]:
        """The parameters that an update can refresh in place: those that lie in one run."""
        flat = {
            held.name: (local_part(p), local_part(p).reshape(-1)) for p, held in self._held.items()
        }
        return {
            name: Target(0, run)
            for name, (weights, run) in flat.items()
            if run.data_ptr() == weights.data_ptr()
        }

    def _refresh_parameters(self, *, done: Container[str]) -> None:
        for p, held in self._held.items():
            if held.name in done:
                continue
            weights = local_part(p)
            flat = weights.reshape(-1)
            self._stream.fetch(held.name, 0, flat, version=self._version, timeout_s=0.0)
            if flat.data_ptr() != weights.data_ptr():  # not contiguous: reshape made a copy
                weights.copy_(flat.view_as(weights))

    def _core_state(self, core: OptimizerCore, p: Tensor) -> dict[str, Tensor]:
        master, exp_avg, exp_avg_sq = (
            part.view(local_part(p).shape) for part in core.read(self._held[p])
        )
        step = torch.tensor(float(core.updates))
        return {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "master": master}


class _Taker:
    """The hook of each held parameter."""

    def __init__(self, optimizer: OffloadStreamAdamW) -> None:
        # A weak reference: a parameter must not keep a forgotten optimizer and its arena alive.
        self.optimizer = weakref.ref(optimizer)

    def __call__(self, p: Tensor) -> None:
        living = self.optimizer()
        if living is not None:
            living._take_gradient(p)


def _check_free(parameters: Sequence[Tensor], group: int) -> None:
    for place, p in enumerate(parameters):
        if p.requires_grad and _is_taken(p):
            raise InputError(
                f"parameter {place} of group {group}, {list(p.shape)}, belongs to another "
                "OffloadStreamAdamW; call close() on that one first"
            )


def _is_taken(p: Tensor) -> bool:
    hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    takers = [hook for hook in hooks.values() if isinstance(hook, _Taker)]
    return any(hook.optimizer() is not None for hook in takers)


def _divided(
    buckets: tuple[Bucket, ...], update_on: str, device: torch.device, slots: int
) -> tuple[Bucket, ...]:
    # Each process may decide for itself: nobody else writes to its arena.
    if update_on == "device":
        return assign_updates(buckets, {bucket.index for bucket in buckets})
    if update_on == "host" or device.type == "cpu":
        return buckets
    rates, host = measure_device_rates(device), measure_host_rate()
    split = split_updates(buckets, rates, host_parameters_per_s=host, slots=slots)
    return assign_updates(buckets, split.on_device)


def _open_arena(path: str | Path | None, buckets: Sequence[Bucket], slots: int) -> Arena:
    if path is not None:
        remove_stale(Path(path))
        return Arena.create(path, run="standalone", buckets=buckets, spare_frames=slots)
    folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    path = folder / f"flatpeak-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
    arena = Arena.create(path, run="standalone", buckets=buckets, spare_frames=slots)
    arena.unlink()  # mapped, it needs no name, and nothing can be left behind
    return arena
