"""An optimizer actor's side: its arena, for workers that do not share its memory."""

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flatpeak.workers.arena import Arena
from flatpeak.workers.errors import ConnectionLost, RunFailed, WaitTimeout
from flatpeak.workers.remote.link import (
    BULK_BYTES,
    LINKS,
    SMALL_BYTES,
    Link,
    listening_device,
    open_store,
)
from flatpeak.workers.remote.messages import DTYPES, REFUSALS, Header, Kind

# A worker is silent for as long as a step takes; when it dies, its connection ends at once.
_SILENCE_S = 10 * 365 * 86400.0
# Fewer elements than torch splits over threads: each thread that serves would have a team of its
# own, beside the one that updates.
_BLOCK = 16384

log = logging.getLogger("flatpeak")


class ArenaServer:
    """Serves `arena` to the workers `ranks`, each in two threads, until they hang up.

    Listens on `host` alone; workers `RemoteArena.connect` to `address` within `timeout_s`.
    """

    def __init__(self, arena: Arena, ranks: Sequence[int], *, host: str, timeout_s: float) -> None:
        self._store = open_store(host, timeout_s=timeout_s)
        self.address = (host, self._store.port)
        self._device, self._timeout_s = listening_device(host), timeout_s
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(arena, rank, name),
                name=f"worker {rank}, {name}",
                daemon=True,
            )
            for rank in ranks
            for name in LINKS
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Returns when all workers have hung up. Raises `WaitTimeout` that names the others."""
        for thread in self._threads:
            thread.join(timeout_s)
        if living := [thread.name for thread in self._threads if thread.is_alive()]:
            raise WaitTimeout(f"still connected after {timeout_s:g} s: {'; '.join(living)}")

    def _serve(self, arena: Arena, rank: int, name: str) -> None:
        try:
            link = Link(
                # Of its own: a store that waits for a peer lets no other thread use it.
                TCPStore(*self.address, timeout=timedelta(seconds=self._timeout_s)),
                f"worker-{rank}/{name}",
                1,
                device=self._device,
                peer=f"worker {rank}",
                timeout_s=self._timeout_s,
            )
        except RunFailed:
            log.exception("worker %d did not connect", rank)
            return
        try:
            _Service(arena, link).run()
        except ConnectionLost as error:
            log.info("no more %s of worker %d: %s", name, rank, error)
        except Exception:
            log.exception("serving %s of worker %d", name, rank)
        finally:
            link.close()


class _Service:
    """Does what one link asks, message by message."""

    def __init__(self, arena: Arena, link: Link) -> None:
        self._arena, self._link = arena, link
        self._squares: list[Tensor] = []
        self._handlers: dict[int, Callable[[Header, Tensor], None]] = {
            Kind.WRITE: self._write,
            Kind.ZERO: self._zero,
            Kind.SQUARE: self._square,
            Kind.SETTLE: self._settle,
            Kind.COUNT_BEFORE: self._count_before,
            Kind.WAIT_VERSION: self._wait_version,
            Kind.READ: self._read,
        }

    def run(self) -> None:
        """Raises `ConnectionLost` when the worker has hung up."""
        while True:
            header, payload = self._link.receive(timeout_s=_SILENCE_S)
            self._handlers[header.kind](header, payload)

    def _write(self, header: Header, values: Tensor) -> None:
        offset, accumulate = header.offset, bool(header.detail)
        for part in values.split(_BLOCK):
            self._arena.write_gradient(header.bucket, offset, part, accumulate=accumulate)
            offset += len(part)

    def _zero(self, header: Header, _: Tensor) -> None:
        self._arena.zero_gradient(header.bucket, header.offset, header.offset + header.size)

    def _square(self, header: Header, _: Tensor) -> None:
        start, stop = header.offset, header.offset + header.size
        self._squares.append(self._arena.square_gradient(header.bucket, start, stop))

    def _settle(self, header: Header, _: Tensor) -> None:
        squares, self._squares = self._squares, []
        if not squares:
            self._link.send(Header(Kind.DONE))
            return
        for part in torch.stack(squares).split(SMALL_BYTES // 8):
            self._done(part)

    def _count_before(self, header: Header, _: Tensor) -> None:
        count = self._arena.count_before(header.version, rank=header.detail)
        self._link.send(Header(Kind.DONE, detail=count))

    def _wait_version(self, header: Header, _: Tensor) -> None:
        try:
            self._arena.wait_version(
                header.bucket, header.version, timeout_s=header.timeout_ms / 1000
            )
        except RunFailed as error:
            self._refuse(error)
            return
        self._link.send(Header(Kind.DONE, version=self._arena.version(header.bucket)))

    def _read(self, header: Header, _: Tensor) -> None:
        dtype = self._arena.weights(header.bucket).dtype
        step, stop = BULK_BYTES // dtype.itemsize, header.offset + header.size
        for start in range(header.offset, stop, step):
            place = self._link.room(dtype, min(step, stop - start))
            try:
                self._arena.check_version(header.bucket, header.version)
                weights = self._arena.weights(header.bucket)
                for at, part in enumerate(place.split(_BLOCK)):
                    part.copy_(weights[start + at * _BLOCK :][: len(part)])
                self._arena.check_version(header.bucket, header.version)
            except RunFailed as error:
                self._refuse(error)
                return
            self._link.send(Header(Kind.DONE, size=len(place), dtype=DTYPES.index(dtype)))

    def _done(self, values: Tensor) -> None:
        self._link.room(values.dtype, len(values)).copy_(values)
        dtype = DTYPES.index(values.dtype)
        self._link.send(Header(Kind.DONE, size=len(values), dtype=dtype))

    def _refuse(self, error: RunFailed) -> None:
        encoded = bytearray(str(error), "utf-8")[:SMALL_BYTES]
        text = torch.frombuffer(encoded, dtype=torch.uint8)
        self._link.room(torch.uint8, len(text)).copy_(text)
        place = next(n for n, kind in enumerate(REFUSALS) if isinstance(error, kind))
        dtype = DTYPES.index(torch.uint8)
        self._link.send(Header(Kind.REFUSED, size=len(text), dtype=dtype, detail=place))
