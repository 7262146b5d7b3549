"""Every metric that a run exports. Exporters, dashboards, rules and tests take names from here.

Prefix `flatpeak_`, base units, and the unit at the end of the name. All have the labels `run`,
`role`, `rank` and `generation` of their process; never a step or an actor's id, which would make a
new series each time. The generation counts the groups of workers that the run had before the one in
which the process started.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "flatpeak_"
PROCESS_LABELS = ("run", "role", "rank", "generation")

Role = Literal["controller", "worker", "optimizer"]


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str
    """Without the prefix."""
    role: Role
    """The processes that export it."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside those of the process."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")


_COMPONENT = ("component",)

METRICS = {
    metric.name: metric
    for metric in (
        # Of the run
        Metric("step", "controller", "Last step whose gradients are complete."),
        Metric("target_steps", "controller", "Steps that the job asks for."),
        Metric("loss", "controller", "Loss of the last step; NaN where it was not finite."),
        Metric("gradient_norm", "controller", "Global gradient norm of the last step, unclipped."),
        Metric("learning_rate", "controller", "Learning rate of the last step."),
        Metric("step_seconds", "controller", "Wall time of the last step."),
        Metric(
            "step_median_seconds", "controller", "Median wall time of the steps in recent memory."
        ),
        Metric(
            "last_step_timestamp_seconds", "controller", "Unix time at which the last step ended."
        ),
        Metric("tokens_total", "controller", "Tokens trained on since this start."),
        Metric("skipped_steps_total", "controller", "Steps skipped for a non-finite gradient."),
        Metric("snapshot_step", "controller", "Step of the newest snapshot; 0 before the first."),
        Metric(
            "snapshot_timestamp_seconds",
            "controller",
            "Unix time of the newest snapshot, or of the start before the first.",
        ),
        Metric("snapshot_every_steps", "controller", "Steps between snapshots; 0 for none."),
        Metric("events_total", "controller", "Events of the run by kind.", ("kind",)),
        # Of a worker
        Metric(
            "peak_window_bytes",
            "worker",
            "Highest device memory of any step that ended within the window.",
            _COMPONENT,
        ),
        Metric(
            "peak_last_step_bytes", "worker", "Device memory peak of the last step.", _COMPONENT
        ),
        Metric(
            "peak_lifetime_bytes",
            "worker",
            "Highest device memory since the process started.",
            _COMPONENT,
        ),
        Metric(
            "planned_peak_bytes",
            "worker",
            "Bound of a component's peak that follows from the job.",
            _COMPONENT,
        ),
        Metric("device_budget_bytes", "worker", "memory.device_budget_bytes of the job."),
        Metric("worker_step_seconds", "worker", "Time of forward and backward of the last step."),
        Metric(
            "optimizer_exposed_seconds",
            "worker",
            "Time the last forward pass stood still for updated weights.",
        ),
        Metric(
            "peer_wait_seconds",
            "worker",
            "Time for which the last step stood still for other ranks; not on CUDA.",
        ),
        Metric("buckets", "worker", "Buckets of this rank."),
        Metric(
            "overlapped_buckets",
            "worker",
            "Of them, those that were updated beside the last forward pass.",
        ),
        Metric(
            "dispatch_imbalance_before_ratio",
            "worker",
            "Routes of the busiest rank over the mean, worst layer, if no weights moved.",
        ),
        Metric("dispatch_imbalance_after_ratio", "worker", "The same as planned."),
        Metric("dispatch_chunks", "worker", "Chunks that a layer was cut into, at most."),
        Metric(
            "dispatch_planned_bytes",
            "worker",
            "What dispatch takes above a layer's inputs and results, as planned, at most.",
        ),
        Metric(
            "dispatch_budget_bytes", "worker", "Bound of dispatch_planned_bytes, where it is set."
        ),
        Metric("dispatch_foreign_experts", "worker", "Experts of other ranks held at once."),
        Metric("dispatch_received_rows", "worker", "Rows received in one chunk, at most."),
        Metric("dispatch_receive_cap_rows", "worker", "memory.dispatch.receive_rows of the job."),
        Metric("boundaries_offloaded_bytes", "worker", "Layer inputs sent to host memory a step."),
        Metric("boundaries_kept_bytes", "worker", "Layer inputs kept on the device a step."),
        Metric("boundaries_slab_bytes", "worker", "Most of the host slab in use at once."),
        # Of an optimizer actor
        Metric("arena_bytes", "optimizer", "Size of its arenas in shared memory."),
        Metric("optimizer_step", "optimizer", "Last step applied to all buckets."),
        Metric("updated_buckets_total", "optimizer", "Bucket updates done by this process."),
        Metric("updated_parameters_total", "optimizer", "Parameters updated by this process."),
        Metric("update_seconds_total", "optimizer", "Time spent in bucket updates."),
    )
}
"""By name without prefix."""
