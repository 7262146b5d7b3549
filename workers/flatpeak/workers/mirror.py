"""Gradients on their way to mirrors: from the owner of an arena to the actor on another node that
keeps the same buckets and does the same updates.

A mirror has frames and gradient regions as its arena has, and no worker. Once it has a step's
gradients in full precision, it needs nothing from anybody to bring its buckets to that step. What
was sent and not confirmed is sent again: it is in the arena of its owner until that is updated.
"""

import logging
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flatpeak.workers.arena import Arena
from flatpeak.workers.arena_owner import ArenaOwner
from flatpeak.workers.errors import ClusterError, ConnectionLost, RunFailed, WaitTimeout
from flatpeak.workers.remote.link import (
    BULK_BYTES,
    LINKS,
    Link,
    listening_device,
    open_store,
)
from flatpeak.workers.remote.messages import DTYPES, Header, Kind

_GRADIENTS = LINKS[0]
_FP32 = DTYPES.index(torch.float32)
# A sender is silent for as long as a step takes; when it dies, its connection ends at once.
_SILENCE_S = 10 * 365 * 86400.0
# The other side waits already, unless it died meanwhile: then this is lost, and tried again.
_CONNECT_S = 10.0
# Fewer elements than torch splits over threads, as in `remote.server`.
_BLOCK = 16384

log = logging.getLogger("flatpeak")


@dataclass(frozen=True)
class Route:
    """The arenas, by number, whose mirrors are with the optimizer actor `holder` at `address`."""

    holder: int
    address: tuple[str, int]
    arenas: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """Bytes of a step that mirrors have confirmed; or why a connection was `lost` before that."""

    nbytes: int = 0
    lost: str | None = None


class MirrorLink:
    """From optimizer actor `sender` to the `MirrorServer` at `route.address`.

    All methods raise `ConnectionLost` when the other actor is gone and `WaitTimeout` when it does
    not answer; so does making one, and `ClusterError` when nobody listens there.
    """

    def __init__(
        self,
        route: Route,
        *,
        sender: int,
        host: str,
        timeout_s: float,
        connect_s: float = _CONNECT_S,
    ) -> None:
        self.arenas = route.arenas
        peer = f"optimizer actor {route.holder} at {route.address[0]}"
        connect_s = min(connect_s, timeout_s)
        try:
            # The store would go on trying, twice as long as it is told, where nobody listens.
            socket.create_connection(route.address, connect_s).close()
            store = TCPStore(*route.address, timeout=timedelta(seconds=connect_s))
        except (OSError, RuntimeError) as error:
            raise ClusterError(f"optimizer {sender} cannot reach {peer}: {error}") from None
        self._link = Link(
            store,
            _link_name(sender),
            0,
            device=listening_device(host),
            peer=peer,
            timeout_s=timeout_s,
            connect_s=connect_s,
        )

    @property
    def sent_bytes(self) -> int:
        return self._link.sent_bytes

    def send(self, arena: Arena, step: int) -> None:
        """The gradients of all buckets, which are those of `step`; there after `settle`."""
        for bucket in arena.buckets:
            offset = 0
            for part in arena.gradient(bucket.index).split(BULK_BYTES // 4):
                size = len(part)
                self._link.room(torch.float32, size).copy_(part)
                self._link.send(Header(Kind.WRITE, bucket.index, offset, size, _FP32, version=step))
                offset += size

    def settle(self) -> None:
        """Returns when the mirrors have all that was sent."""
        self._link.send(Header(Kind.SETTLE))
        header, _ = self._link.receive()
        assert header.kind == Kind.DONE, f"{self._link.peer} answered {header}"

    def close(self) -> None:
        self._link.close()


class MirrorServer:
    """Writes what optimizer actors `senders` send into the gradient regions of `mirrors`, each in a
    thread, until they hang up or it is closed. Listens on `host` alone."""

    def __init__(
        self, mirrors: Iterable[Arena], senders: Sequence[int], *, host: str, timeout_s: float
    ) -> None:
        self._mirror = {bucket.index: arena for arena in mirrors for bucket in arena.buckets}
        self._store = open_store(host, timeout_s=timeout_s)
        self.address = (host, self._store.port)
        self._device, self._timeout_s = listening_device(host), timeout_s
        self._writing, self._closed = threading.Lock(), False
        self._threads = [
            threading.Thread(
                target=self._serve, args=(sender,), name=f"mirror of {sender}", daemon=True
            )
            for sender in senders
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """From now on nothing is written any more, whatever is on its way: a sender that was given
        up may have left gradients of an old step in its connection."""
        with self._writing:
            self._closed = True

    def join(self, timeout_s: float) -> None:
        """Returns when all senders have hung up; raises `RunFailed` that names the others."""
        for thread in self._threads:
            thread.join(timeout_s)
        if living := [thread.name for thread in self._threads if thread.is_alive()]:
            raise RunFailed(f"still connected after {timeout_s:g} s: {'; '.join(living)}")

    def _serve(self, sender: int) -> None:
        try:
            link = Link(
                # Of its own: a store that waits for a peer lets no other thread use it.
                TCPStore(*self.address, timeout=timedelta(seconds=self._timeout_s)),
                _link_name(sender),
                1,
                device=self._device,
                peer=f"optimizer {sender}",
                timeout_s=self._timeout_s,
            )
        except RunFailed as error:
            log.warning("optimizer %d did not connect to its mirrors: %s", sender, error)
            return
        try:
            while not self._closed:
                header, values = link.receive(timeout_s=_SILENCE_S)
                if header.kind == Kind.WRITE:
                    self._write(header, values)
                else:
                    link.send(Header(Kind.DONE))
        except ConnectionLost as error:
            log.info("no more gradients of optimizer %d: %s", sender, error)
        except Exception:
            log.exception("mirroring optimizer %d", sender)
        finally:
            link.close()

    def _write(self, header: Header, values: Tensor) -> None:
        with self._writing:
            if self._closed:
                raise ConnectionLost("other connections have taken its place")
            arena, step = self._mirror[header.bucket], header.version
            held = arena.version(header.bucket)
            if held != step - 1:
                raise RunFailed(
                    f"gradients of step {step} came for bucket {header.bucket} of {arena.path}, "
                    f"which holds version {held}"
                )
            target = arena.gradient(header.bucket)[header.offset : header.offset + header.size]
            for place, part in zip(target.split(_BLOCK), values.split(_BLOCK), strict=True):
                place.copy_(part)


class MirrorPort:
    """An optimizer actor's ends of all such connections: of the arenas that `owner` has, to their
    mirrors, and of its mirrors. The methods are for one thread; `index` is the actor's."""

    def __init__(self, owner: ArenaOwner, index: int, *, host: str, timeout_s: float) -> None:
        self._owner, self._index = owner, index
        self._host, self._timeout_s = host, timeout_s
        self._server: MirrorServer | None = None
        self._links: list[MirrorLink] = []

    def serve(self, senders: Sequence[int]) -> tuple[str, int]:
        """Lets these actors, and no others any more, write to the mirrors; the address for them."""
        if self._server is not None:
            self._server.close()
        mirrors, timeout_s = self._owner.mirrors.arenas, self._timeout_s
        self._server = MirrorServer(mirrors, senders, host=self._host, timeout_s=timeout_s)
        return self._server.address

    def link(self, routes: Sequence[Route]) -> str | None:
        """Connects to the mirrors of its arenas, and hangs up on others; why that failed, if so."""
        self._hang_up()
        try:
            for route in routes:
                self._links.append(
                    MirrorLink(
                        route, sender=self._index, host=self._host, timeout_s=self._timeout_s
                    )
                )
        except (ClusterError, WaitTimeout) as error:
            # An answer, not a failure: it is the other actor that has to be replaced.
            self._hang_up()
            return str(error)
        return None

    def send(self, step: int) -> Sent:
        """Returns when all mirrors of its arenas have the gradients of `step`, which is the next.

        Raises `WaitTimeout` when an actor that is connected does not answer.
        """
        committed = self._owner.core.step
        assert committed == step - 1, f"step {step} is to be mirrored after step {committed}"
        before = sum(link.sent_bytes for link in self._links)
        try:
            self._send(self._owner.originals, step)
        except ConnectionLost as error:
            self._hang_up()
            return Sent(lost=str(error))
        return Sent(sum(link.sent_bytes for link in self._links) - before)

    def close(self) -> None:
        self._hang_up()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _send(self, arenas: Mapping[int, Arena], step: int) -> None:
        linked = sorted(number for link in self._links for number in link.arenas)
        if linked != sorted(arenas):
            raise ConnectionLost(f"of arenas {sorted(arenas)} mirrors of {linked} are connected")
        for link in self._links:
            for number in link.arenas:
                link.send(arenas[number], step)
        for link in self._links:
            link.settle()

    def _hang_up(self) -> None:
        for link in self._links:
            link.close()
        self._links = []


def _link_name(sender: int) -> str:
    return f"optimizer-{sender}/{_GRADIENTS}"
