"""As many workers as the cluster has room for (`cluster.autoscale.workers`).

The driver looks, since it outlives the controllers between which workers change.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial

from flatpeak.controller.autoscaler import RoomForWorkers
from flatpeak.controller.autoscaling import allowed_workers, room_for_workers
from flatpeak.controller.lives import Lives
from flatpeak.controller.placement import free_resources
from flatpeak.controller.scale_requests import ScaleRequest
from flatpeak.controller.spec import Spec

_LOOK_S = 2.0
_RELEASED_S = 10.0
_POLL_S = 0.25


class Growth:
    """Asks for more workers of the job `asked` for, once there has been room for long enough, and
    says how many go on when a node is lost.

    `suits` says whether the model and the batch can do with the workers of a job.
    """

    def __init__(
        self,
        asked: Spec,
        *,
        suits: Callable[[Spec], bool],
        free: Callable[[], Mapping[str, Mapping[str, float]]] = free_resources,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._free = asked.cluster.autoscale, free
        self._clock, self._sleep = clock, sleep
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
        self._room.observe(self._room_now(lives))
        decision = self._room.decide(lives.life.spec.cluster.workers, self._allowed)
        if decision.wanted is None:
            return None
        self._room = RoomForWorkers(self._settings, clock=self._clock)
        request = ScaleRequest(workers=decision.wanted)
        self._asked[request.id] = decision.wanted
        return request

    def left(self, lives: Lives) -> int:
        """The workers to go on with after a life that lost a node: as many as it had, or the most
        that there is room for now where the job can do with fewer."""
        present = lives.life.spec.cluster.workers
        if self._settings.workers is None:
            return present
        # What the processes of that life had is free within seconds.
        deadline = self._clock() + _RELEASED_S
        while (room := self._room_now(lives, starts=True)) < present and self._clock() < deadline:
            self._sleep(_POLL_S)
        if room >= present:
            return present
        return max((n for n in self._allowed if n <= room), default=present)

    def _room_now(self, lives: Lives, *, starts: bool = False) -> int:
        """For how many workers there is room: for more of them, or for all of a life that `starts`
        and needs optimizer actors too."""
        cluster, free = lives.life.spec.cluster, self._free()
        worker = {"CPU": float(cluster.cpus_per_worker)} | lives.devices
        cores = float(cluster.cpus_per_optimizer)
        room = partial(room_for_workers, free, worker=worker, optimizer={"CPU": cores})
        if cluster.optimizer_placement == "beside":
            return room(served=() if starts else lives.nodes)
        if not starts:
            return room(served=free)
        # One actor is enough, on whatever node that leaves most room.
        able = [node for node, has in free.items() if has.get("CPU", 0.0) >= cores]
        return max((room(served=free.keys() - {node}) for node in able), default=0)

    def refused(self, request: str) -> None:
        """If it was one of these, so many are not asked for again: each try stops the training."""
        workers = self._asked.pop(request, None)
        self._allowed = tuple(allowed for allowed in self._allowed if allowed != workers)
