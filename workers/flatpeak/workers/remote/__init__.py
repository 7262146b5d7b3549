"""Buckets whose optimizer actor shares no memory with their worker: the same interface over gloo.

`RemoteArena` is the worker's side, a `gradients.BucketHome`; `ArenaServer` is the actor's, which
does to its arena what messages ask for. A worker and an actor have two links, each a gloo group of
the two alone, used by one thread at a time on either side:

* gradients: write, zero and square, which are not answered, and `settle`, which is, once a step:
  what came before it is done by then. So gradients stream without waiting for the network.
* weights: wait for a version, and read, which is answered in pieces.

Messages say all that they need, so neither side relies on an order agreed in advance; within a link
they are handled in the order of sending. Memory is bounded: `STAGING_BYTES` for a pair of worker
and actor, in each of the two.
"""

from flatpeak.workers.remote.client import RemoteArena
from flatpeak.workers.remote.link import STAGING_BYTES, open_store
from flatpeak.workers.remote.server import ArenaServer

__all__ = ["STAGING_BYTES", "ArenaServer", "RemoteArena", "open_store"]
