"""How much of the optimizer's time a forward pass sees: a simulation on the real trainer.

One rank trains a small model, clipped; its optimizer runs in a thread. The model is too small for
real times, so both sides sleep as well: the update for each bucket, by its size, as if it came over
a slow link, and the forward pass in each layer, in sum for as long as the update: half of a layer's
share before its attention, half before its experts.
"""

import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

from flatpeak.controller.spec import Spec
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.optimizer import OptimizerCore
from flatpeak.workers.support import decoder_of
from local_run import LocalRun, tiny_spec
from ranks import run_ranks
from tiny_models import tiny_content


@dataclass(frozen=True)
class Overlap:
    """Of each step but the first; seconds are those by which an update delayed the forward pass."""

    buckets: int
    overlapped_buckets: int
    """The median of those that were not yet updated when the first layer had its weights."""
    exposed_s: list[float]
    first_s: list[float]
    """Of them, those before the first module had its weights."""
    serial_s: list[float]
    """Where the forward pass waits for the whole update."""
    same_losses: bool

    def ratios(self) -> dict[str, float | None]:
        return {
            "overlapped_bucket_fraction": self.overlapped_buckets / self.buckets,
            "exposed_vs_serial_simulated": statistics.median(self.exposed_s)
            / statistics.median(self.serial_s),
        }


def simulate(*, layers: int = 24, update_s: float = 1.0, steps: int = 3) -> Overlap:
    """An update that takes `update_s` seconds, beside a forward pass of as much."""
    spec = tiny_spec(
        tiny_content("qwen3_moe", num_hidden_layers=layers, vocab_size=257),
        train={"steps": steps + 1},
        memory={"optimizer": {"bucket_parameters": 1000}},
        cluster={"workers": 1},
        parallel={"sequence": 1, "expert": 1, "vocabulary": 1},
    )
    with tempfile.TemporaryDirectory() as folder:
        ((alone, waited), (beside, exposed)) = run_ranks(
            1, _both, spec, folder, update_s, timeout_s=600.0
        )[0]
    reports = [result.refresh for result in beside.results[1:]]
    return Overlap(
        buckets=reports[0].buckets,
        overlapped_buckets=int(statistics.median(r.overlapped_buckets for r in reports)),
        exposed_s=exposed,
        first_s=[report.first_s for report in reports],
        serial_s=waited,
        same_losses=alone.losses == beside.losses,
    )


def _both(_: int, spec: Spec, folder: str, update_s: float) -> list[Any]:
    return [_train(LocalRun(0, spec, folder), update_s, serial=serial) for serial in (True, False)]


def _train(run: LocalRun, update_s: float, *, serial: bool) -> tuple[Any, list[float]]:
    """Outcome of the run, and the seconds by which each update, copies of the new weights included,
    delayed the forward pass after it."""
    model, core = run.trainer.sharded.model, run.core
    assert core is not None
    total = sum(bucket.size for bucket in core.buckets)
    _throttle(core, update_s / total)
    forward_runs = threading.Event()
    # A backward pass recomputes the layers: it does not sleep again.
    run.trainer.sharded.head.register_forward_hook(lambda *_: forward_runs.clear())
    slow = [*decoder_of(model).layers, *(experts for _, experts in moe_layers(model))]
    for module in slow:
        module.register_forward_pre_hook(
            lambda *_: time.sleep(update_s / len(slow)) if forward_runs.is_set() else None
        )
    exposed, updating = [], 0.0
    optimizer: threading.Thread | None = None
    while run.step < run.spec.train.steps:
        forward_runs.set()
        result = run.forward_and_backward()
        if optimizer is not None:
            optimizer.join()
            exposed.append(updating + result.refresh.exposed_s)
        optimizer = threading.Thread(target=run.apply, daemon=True)
        began = time.perf_counter()
        optimizer.start()
        if serial:
            optimizer.join()
        updating = time.perf_counter() - began
    if optimizer is not None:
        optimizer.join()
    return run.close(), exposed


def _throttle(core: OptimizerCore, seconds_per_parameter: float) -> None:
    update = core._update_bucket

    def throttled(bucket: Bucket, *args: Any) -> None:
        time.sleep(bucket.size * seconds_per_parameter)
        update(bucket, *args)

    core._update_bucket = throttled
