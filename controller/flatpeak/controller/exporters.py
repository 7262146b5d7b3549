"""The processes of a run as Prometheus finds them: each serves its own metrics, from whenever it
comes until it goes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flatpeak.controller.metrics import RunMetrics
from flatpeak.controller.placement import Placed
from flatpeak.controller.runs import Event, RunEvent, event
from flatpeak.controller.scale_requests import DONE
from flatpeak.controller.waiting import Died, Interrupted
from flatpeak.controller.worker_group import Ask
from flatpeak.workers.errors import RunFailed
from flatpeak.workers.metrics import Serving


class Exporters:
    """Keeps the list of who serves in `metrics`; nobody does where there is no `serving`.

    `workers` and `optimizers` are those of now. Metrics never hurt a run: who cannot serve them is
    told of in a warning.
    """

    def __init__(
        self,
        metrics: RunMetrics,
        serving: Serving | None,
        *,
        workers: Sequence[Placed],
        optimizers: Sequence[Placed],
        ask: Ask,
    ) -> None:
        self._metrics, self._serving = metrics, serving
        self._workers, self._optimizers, self._ask = workers, optimizers, ask

    def open(self) -> Iterator[Event]:
        """Lets all that there are serve, and the controller itself."""
        if self._serving is not None:
            yield self._metrics.serve(self._serving)
            yield from self._export([*self._workers, *self._optimizers])

    def follow(self, happened: RunEvent) -> Iterator[Event]:
        """Lets those serve that came with it; `RunMetrics` sees who is lost."""
        if happened.kind == DONE:
            for who in happened.detail["left"]:
                self._metrics.drop_target(who)
            yield from self._export(self._named(happened.detail["joined"]))
        elif happened.kind == "workers_replaced":
            yield from self._export(self._workers)
        elif happened.kind == "optimizer_replaced":
            yield from self._export(self._named([happened.detail["actor"]]))

    def _named(self, names: Sequence[str]) -> list[Placed]:
        return [actor for actor in self._optimizers if actor.name in names]

    def _export(self, actors: Sequence[Placed]) -> Iterator[Event]:
        if self._serving is None or not actors:
            return
        at = replace(self._serving, port=0)
        try:
            served = self._ask([*actors], "serving metrics", "serve_metrics", at)
        except Interrupted:
            return  # the next wait of the run itself ends it in good order
        except (RunFailed, Died) as error:
            # Of an actor that died, others who ask it will say so.
            reason = error.cause if isinstance(error, Died) else error
            names = ", ".join(actor.name for actor in actors)
            yield event("warning", text=f"{reason}; the run goes on without metrics of {names}")
            return
        for actor in actors:
            self._metrics.add_target(actor.name, *served[actor.name])
