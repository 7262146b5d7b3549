"""What the controller exports of a run, and where the other processes export theirs."""

import os
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from flatpeak.controller.runs import RunEvent, StepRecord, event
from flatpeak.controller.spec import MetricsSpec, Spec
from flatpeak.workers.actors import at_this_node
from flatpeak.workers.errors import ClusterError, SpecError
from flatpeak.workers.metrics import MetricsServer, ProcessMetrics, Serving, is_token

_RECENT_STEPS = 32


class RunMetrics(ProcessMetrics):
    """The run's own metrics, fed with its events, and the addresses of its processes."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(run=spec.run, role="controller")
        self._server: MetricsServer | None = None
        self._targets: dict[str, dict[str, Any]] = {}
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.set("target_steps", spec.train.steps)
        self.set("snapshot_every_steps", spec.snapshots.every_steps)
        self.set("snapshot_step", 0)
        self.set("snapshot_timestamp_seconds", time.time())
        self.set("last_step_timestamp_seconds", time.time())
        self.add("tokens_total", 0)
        self.add("skipped_steps_total", 0)
        self.add("events_total", 0, "snapshot_failed")  # an increase is seen from 0 on

    def serve(self, serving: Serving) -> RunEvent:
        """Begins to serve. Metrics never hurt a run: where they cannot be served, it warns."""
        try:
            pages = {"/health": self.health, "/targets": self.targets}
            self._server = MetricsServer(at_this_node(serving), self.registry, pages=pages)
        except ClusterError as error:
            return event("warning", text=f"{error}; the run goes on without")
        self.add_target("controller", self._server.address, self.labels)
        return event("metrics", address=self._server.address)

    def add_target(self, name: str, address: str, labels: dict[str, str]) -> None:
        """`labels` of the process; Prometheus gives them to what it says of the target itself."""
        # A new dictionary, since the server's threads read the old one.
        entry = {"targets": [address], "labels": labels}
        self._targets = self._targets | {name: entry}

    def drop_target(self, name: str) -> None:
        self._targets = {other: at for other, at in self._targets.items() if other != name}

    def targets(self) -> list[dict[str, Any]]:
        """As Prometheus' HTTP service discovery wants them."""
        return list(self._targets.values())

    def health(self) -> dict[str, Any]:
        return self.labels | {"processes": sorted(self._targets)}

    def observe(self, happened: StepRecord | RunEvent) -> None:
        if isinstance(happened, StepRecord):
            self._observe_step(happened)
            return
        self.add("events_total", 1, happened.kind)
        if happened.kind == "optimizer_lost":
            self.drop_target(happened.detail["actor"])
        elif happened.kind == "worker_lost":  # all of them are ended
            for name in [n for n, at in self._targets.items() if at["labels"]["role"] == "worker"]:
                self.drop_target(name)
        if happened.kind == "snapshot":
            self.set("snapshot_step", happened.detail["step"])
            self.set("snapshot_timestamp_seconds", happened.time)

    def _observe_step(self, record: StepRecord) -> None:
        self._recent.append(record.step_seconds)
        self.set("step", record.step)
        self.set("loss", record.loss)
        self.set("gradient_norm", record.grad_norm)
        self.set("learning_rate", record.lr)
        self.set("step_seconds", record.step_seconds)
        self.set("step_median_seconds", median(self._recent))
        self.set("last_step_timestamp_seconds", time.time())
        self.add("tokens_total", record.tokens)
        self.add("skipped_steps_total", record.skipped)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def serving_of(metrics: MetricsSpec) -> Serving | None:
    """Where to serve, with the token out of its file; None where nothing is exported.

    Raises SpecError when the file does not hold one.
    """
    if not metrics.export:
        return None
    return Serving(metrics.host, metrics.port, _token_in(metrics.token_file))


def _token_in(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        token = Path(os.path.expanduser(path)).read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise SpecError(
            f"metrics.token_file = {path} cannot be read: {reason}; put the bearer token into it, "
            "or leave the setting out to serve metrics without one"
        ) from None
    if not is_token(token):
        raise SpecError(
            f"metrics.token_file = {path} holds no token: one word of printable ASCII is wanted"
        )
    return token
