"""Streams for tests that do their work late, as a device does."""

from collections import deque
from random import Random


class Deferred:
    """Streams that do their work late, in any order that lanes and marks allow.

    `seen` runs whenever the process comes back to them, as another process could at any time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else Random(seed)  # None: only what is waited for
        self.lanes = {lane: deque() for lane in ("reader", "in", "update", "out", "weights")}
        self.log: list[tuple[str, str, int]] = []
        self.counts = dict.fromkeys(self.lanes, 0)
        self.seen = lambda: None

    def issue(self, lane, work, *, after=()):
        self.seen()
        mark = {"lane": lane, "number": self.counts[lane], "done": False}
        self.counts[lane] += 1
        self.lanes[lane].append((work, after, mark))
        self.log.append(("issued", lane, mark["number"]))
        while self.random is not None and self.random.random() < 0.6 and self.ready():
            self.do(self.random.choice(self.ready()))
        return mark

    def now(self):
        return {"done": True}

    def finish(self, mark):
        while self.random is not None and not mark["done"]:
            ready = self.ready()
            assert ready, "the lanes wait for each other"
            self.do(self.random.choice(ready))
        self.reach(mark)
        self.seen()

    def reach(self, mark):
        while not mark["done"]:
            for before in self.lanes[mark["lane"]][0][1]:
                self.reach(before)
            self.do(mark["lane"])

    def ready(self):
        heads = [(lane, queue[0]) for lane, queue in self.lanes.items() if queue]
        return [lane for lane, (_, after, _) in heads if all(m["done"] for m in after)]

    def do(self, lane):
        work, _, mark = self.lanes[lane].popleft()
        work()
        mark["done"] = True
        self.log.append(("done", lane, mark["number"]))
