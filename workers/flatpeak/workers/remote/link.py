"""Messages between two processes, in order, over a gloo group of these two alone.

A group of its own keeps a failure between the two: gloo gives up all connections of a group where
one wait runs out of time. Each side has fixed buffers and keeps all those for receiving posted, so
that a sender rarely waits for its peer, and a sender without one free waits: nothing piles up.
"""

import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from flatpeak.workers.errors import ConnectionLost, WaitTimeout
from flatpeak.workers.remote.messages import HEADER, Header

# Most that a message carries: of gradients or weights, and the other way.
BULK_BYTES, SMALL_BYTES = 2**20, 2**16
_BULK, _SMALL = (4, BULK_BYTES), (2, SMALL_BYTES)  # buffers, and bytes of each
STAGING_BYTES = 2 * sum(count * (HEADER.size + nbytes) for count, nbytes in (_BULK, _SMALL))

LINKS = ("gradients", "weights")
"""On the first the worker sends much, on the second the actor."""


def open_store(host: str, port: int = 0, *, world: int | None = None, timeout_s: float) -> TCPStore:
    """A store for others to meet at, which listens on `host` alone; port 0 takes any free one.

    Raises OSError when the port cannot be had.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        port = listener.getsockname()[1]
        listener.listen()
    except OSError:
        listener.close()
        raise
    # The store takes over the socket: no other process can take the port in between.
    return TCPStore(
        host,
        port,
        world,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def listening_device(host: str) -> Any:
    """What the links of a process share: a socket that listens on `host` alone, and a thread."""
    return ProcessGroupGloo.create_device(hostname=host)


class Link:
    """One end; `side` is 0 for the worker and 1 for the actor. Returns when the other end is there,
    which may take `connect_s`, or else as long as an answer.

    `peer` is the other end's name in messages. Methods are for one thread at a time. They raise
    `ConnectionLost` when the peer is gone and `WaitTimeout` when it does not answer; the link is of
    no use after either.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        side: int,
        *,
        device: Any,
        peer: str,
        timeout_s: float,
        connect_s: float | None = None,
        pinned: bool = False,
    ) -> None:
        connect_s = timeout_s if connect_s is None else connect_s
        self.peer, self.sent_bytes, self.received_bytes = peer, 0, 0
        self._other, self.timeout_s = 1 - side, timeout_s
        # The stubs lack the options, which alone can choose the address to listen on.
        options: Any = cast(Any, ProcessGroupGloo)._Options()
        options._devices = [device]
        options._timeout = timedelta(seconds=connect_s)
        options._threads = 1  # those run collectives, of which there is none
        self._group: Any = self._within(
            connect_s, lambda: ProcessGroupGloo(PrefixStore(name, store), side, 2, options)
        )
        bulk_sender = LINKS.index(name.rpartition("/")[2])
        sending, receiving = (_BULK, _SMALL) if side == bulk_sender else (_SMALL, _BULK)
        self._outgoing = _slots(*sending, pinned=pinned)
        self._incoming = _slots(*receiving, pinned=pinned)
        self._held: _Slot | None = None
        for slot in self._incoming:
            self._post(slot)

    def room(self, dtype: torch.dtype, count: int) -> Tensor:
        """Where to put the payload of the next `send`: [count] of `dtype`, at most `BULK_BYTES` or
        `SMALL_BYTES`, by the direction."""
        slot = self._outgoing[0]
        self._finish(slot, self.timeout_s)
        return slot.payload(dtype, count)

    def send(self, header: Header) -> None:
        """Sends the header, with what was put into `room` if it says that a payload follows.
        Returns before they have left."""
        slot = self._outgoing.pop(0)
        self._outgoing.append(slot)
        self._finish(slot, self.timeout_s)
        header.pack_into(slot.header)
        message = slot.data[: HEADER.size + header.payload_bytes]
        self.sent_bytes += len(message)
        slot.work = self._within(
            self.timeout_s, lambda: self._group.send([message], self._other, 0)
        )

    def receive(self, *, timeout_s: float | None = None) -> tuple[Header, Tensor]:
        """The next message and its payload, which is good until the next `receive`.

        Waits for the link's own timeout, or `timeout_s`.
        """
        if self._held is not None:
            self._post(self._held)
        slot = self._held = self._incoming.pop(0)
        self._incoming.append(slot)
        self._finish(slot, self.timeout_s if timeout_s is None else timeout_s)
        header = Header.unpack_from(slot.header)
        self.received_bytes += HEADER.size + header.payload_bytes
        dtype = header.payload_dtype or torch.uint8
        return header, slot.payload(dtype, header.payload_bytes // dtype.itemsize)

    def close(self) -> None:
        """Hangs up; the peer learns of it at once."""
        for slot in self._outgoing + self._incoming:
            slot.work = None
        self._group = None

    def _post(self, slot: "_Slot") -> None:
        # A message may be shorter than the buffer: its header says how much it brings.
        slot.work = self._within(
            self.timeout_s, lambda: self._group.recv([slot.data], self._other, 0)
        )

    def _finish(self, slot: "_Slot", timeout_s: float) -> None:
        if slot.work is not None:
            work, slot.work = slot.work, None
            self._within(timeout_s, lambda: work.wait(timedelta(seconds=timeout_s)))

    def _within(self, timeout_s: float, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            # Gloo's errors have one type; the time tells which it was.
            if time.monotonic() - began >= timeout_s - 1e-3:
                raise WaitTimeout(
                    f"{self.peer} did not answer within {timeout_s:g} s; if it lives, raise "
                    "cluster.start_timeout_s"
                ) from None
            raise ConnectionLost(
                f"the connection to {self.peer} is lost: {_reason(error)}"
            ) from None


class _Slot:
    """A buffer for one message, and the transfer that uses it."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.data = torch.empty(HEADER.size + nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.header = self.data.numpy().data
        self.work: Any = None

    def payload(self, dtype: torch.dtype, count: int) -> Tensor:
        stop = HEADER.size + count * dtype.itemsize
        assert stop <= len(self.data), f"{count} elements of {dtype} in {len(self.data)} bytes"
        return self.data[HEADER.size : stop].view(dtype)


def _slots(count: int, nbytes: int, *, pinned: bool) -> list[_Slot]:
    return [_Slot(nbytes, pinned=pinned) for _ in range(count)]


def _reason(error: RuntimeError) -> str:
    """Gloo's message without the place in its source and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". ")[0]
