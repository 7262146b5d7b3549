"""Marks in Grafana for what happens to a run."""

from flatpeak.controller.dashboards.grafana import Grafana
from flatpeak.controller.display import event_line
from flatpeak.controller.outlet import Outlet
from flatpeak.controller.runs import Event, RunEvent

MARKED = frozenset(
    {
        "started",
        "resumed",
        "snapshot",
        "snapshot_failed",
        "optimizer_lost",
        "optimizer_replaced",
        "optimizers_scaled",
        "optimizers_moved",
        "worker_lost",
        "workers_replaced",
        "workers_leaving",
        "workers_scaled",
        "controller_lost",
        "controller_replaced",
        "node_draining",
        "node_lost",
        "state_lost",
        "interrupted",
        "failed",
        "finished",
    }
)
_LAST_WORDS_S = 5.0


class Annotator(Outlet):
    """Sends the marked events of a run to Grafana."""

    def __init__(self, grafana: Grafana, run: str) -> None:
        super().__init__(
            "Grafana", consequence="no more marks are made there", last_words_s=_LAST_WORDS_S
        )
        self._grafana, self._run = grafana, run

    def wants(self, event: Event) -> bool:
        return isinstance(event, RunEvent) and event.kind in MARKED

    def send(self, event: Event) -> None:
        assert isinstance(event, RunEvent)
        text = event_line(event) or event.kind
        self._grafana.annotate(text, tags=["flatpeak", self._run, event.kind], time_s=event.time)

    def finish(self, *, failed: bool) -> None:
        """Every mark was made at once."""
