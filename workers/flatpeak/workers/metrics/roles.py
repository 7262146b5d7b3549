"""What the metrics of workers and optimizer actors are set from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatpeak.workers.metrics.process import ProcessMetrics
from flatpeak.workers.settings import dispatch_budget_of

if TYPE_CHECKING:
    from flatpeak.controller.spec import Spec
    from flatpeak.workers.arena import Arena
    from flatpeak.workers.optimizer import OptimizerCore
    from flatpeak.workers.trainer import StepResult


class WorkerMetrics(ProcessMetrics):
    """Of one rank, set once a step."""

    def __init__(self, spec: "Spec", rank: int, generation: int = 0) -> None:
        super().__init__(run=spec.run, role="worker", rank=rank, generation=generation)
        self._window_s = spec.metrics.window_s
        memory = spec.memory
        if memory.device_budget_bytes is not None:
            self.set("device_budget_bytes", memory.device_budget_bytes)
        if (budget := dispatch_budget_of(spec)) is not None:
            self.set("dispatch_budget_bytes", budget)
        if memory.dispatch.receive_rows != "auto":
            self.set("dispatch_receive_cap_rows", memory.dispatch.receive_rows)

    def observe(self, result: "StepResult") -> None:
        for component, nbytes in result.peaks.items():
            self.record("peak_window_bytes", nbytes, component, window_s=self._window_s)
            self.set("peak_last_step_bytes", nbytes, component)
            self.raise_to("peak_lifetime_bytes", nbytes, component)
        for component, nbytes in result.planned.items():
            self.set("planned_peak_bytes", nbytes, component)
        if result.dispatch.planned_bytes:
            self.set("dispatch_planned_bytes", result.dispatch.planned_bytes)
        self.set("worker_step_seconds", result.seconds)
        self.set("optimizer_exposed_seconds", result.refresh.exposed_s)
        if result.waited_s is not None:
            self.set("peer_wait_seconds", result.waited_s)
        self.set("buckets", result.refresh.buckets)
        self.set("overlapped_buckets", result.refresh.overlapped_buckets)
        self.set("dispatch_imbalance_before_ratio", result.dispatch.imbalance_before)
        self.set("dispatch_imbalance_after_ratio", result.dispatch.imbalance_after)
        self.set("dispatch_chunks", result.dispatch.chunks)
        self.set("dispatch_foreign_experts", result.dispatch.foreign_experts)
        self.set("dispatch_received_rows", result.dispatch.received_rows)
        self.set("boundaries_offloaded_bytes", result.boundaries.offloaded_bytes)
        self.set("boundaries_kept_bytes", result.boundaries.kept_bytes)
        self.set("boundaries_slab_bytes", result.boundaries.slab_bytes)


class OptimizerMetrics(ProcessMetrics):
    """Of one optimizer actor, set after each update."""

    def __init__(self, spec: "Spec", index: int, generation: int = 0) -> None:
        super().__init__(run=spec.run, role="optimizer", rank=index, generation=generation)
        self._counted = (0, 0, 0.0)

    def observe(self, core: "OptimizerCore", *, mirrors: Sequence["Arena"] = ()) -> None:
        """`core` is of the arenas that workers use; `mirrors` are others that the actor owns."""
        counters = core.counters
        now = (counters.updated_buckets, counters.updated_parameters, counters.update_s)
        before, self._counted = self._counted, now
        buckets, parameters, seconds = (new - old for new, old in zip(now, before, strict=True))
        self.add("updated_buckets_total", buckets)
        self.add("updated_parameters_total", parameters)
        self.add("update_seconds_total", seconds)
        self.set("arena_bytes", sum(arena.nbytes for arena in (*core.arenas, *mirrors)))
        self.set("optimizer_step", core.step)
