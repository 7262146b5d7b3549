"""Workers that come by themselves when the cluster has room for them (`cluster.autoscale.workers`).

The driver looks, since it outlives the controllers between which workers change.
"""

import time
from collections.abc import Callable, Mapping

from ray._private.state import available_resources_per_node

from flatpeak.controller.autoscaler import RoomForWorkers
from flatpeak.controller.autoscaling import allowed_workers, room_for_workers
from flatpeak.controller.lives import Lives
from flatpeak.controller.scale_requests import ScaleRequest
from flatpeak.controller.spec import Spec

_LOOK_S = 2.0


class Growth:
    """Asks for more workers of the job `asked` for, once there has been room for long enough.

    `suits` says whether the model and the batch can do with the workers of a job.
    """

    def __init__(
        self,
        asked: Spec,
        *,
        suits: Callable[[Spec], bool],
        free: Callable[[], Mapping[str, Mapping[str, float]]] = available_resources_per_node,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._free, self._clock = asked.cluster.autoscale, free, clock
        self._allowed = allowed_workers(asked, suits)
        self._room = RoomForWorkers(self._settings, clock=clock)
        self._next = 0.0
        self._asked: dict[str, int] = {}

    def look(self, lives: Lives) -> ScaleRequest | None:
        """What to ask for now, if anything; what is asked for is not asked for again before there
        has been room anew for as long."""
        if self._settings.workers is None or self._clock() < self._next:
            return None
        self._next = self._clock() + _LOOK_S
        cluster = lives.life.spec.cluster
        worker = {"CPU": float(cluster.cpus_per_worker)} | lives.devices
        optimizer = {"CPU": float(cluster.cpus_per_optimizer)}
        room = room_for_workers(
            self._free(), worker=worker, optimizer=optimizer, served=lives.nodes
        )
        self._room.observe(room)
        decision = self._room.decide(cluster.workers, self._allowed)
        if decision.wanted is None:
            return None
        self._room = RoomForWorkers(self._settings, clock=self._clock)
        request = ScaleRequest(workers=decision.wanted)
        self._asked[request.id] = decision.wanted
        return request

    def refused(self, request: str) -> None:
        """If it was one of these, so many are not asked for again: each try stops the training."""
        workers = self._asked.pop(request, None)
        self._allowed = tuple(allowed for allowed in self._allowed if allowed != workers)
