"""A worker's side of an arena on another node."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flatpeak.workers.errors import ClusterError
from flatpeak.workers.remote.link import BULK_BYTES, LINKS, Link, listening_device
from flatpeak.workers.remote.messages import DTYPES, REFUSALS, Header, Kind


class RemoteArena:
    """A `gradients.BucketHome` of an actor that shares no memory with this process.

    Any thread may call it; one call at a time about gradients, one about weights. All raise
    `ConnectionLost` when the actor is gone, `WaitTimeout` when it does not answer.
    """

    def __init__(self, gradients: Link, weights: Link) -> None:
        self._gradients, self._weights = _Line(gradients), _Line(weights)
        self._known: dict[int, int] = {}
        self._squares: list[Tensor] = []
        self._unsettled = False

    @classmethod
    def connect(
        cls,
        address: tuple[str, int],
        *,
        actor: int,
        rank: int,
        host: str,
        timeout_s: float,
        pinned: bool = False,
    ) -> Self:
        """Joins worker `rank` to actor `actor`, whose `ArenaServer` is at `address`.

        `host` is this node's address; `pinned` buffers let a CUDA device copy straight into them.
        Raises `ClusterError` when nobody listens there.
        """
        peer = f"optimizer actor {actor} at {address[0]}"
        try:
            store = TCPStore(*address, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ClusterError(f"worker {rank} cannot reach {peer}: {error}") from None
        device = listening_device(host)
        gradients, weights = (
            Link(
                store,
                f"worker-{rank}/{name}",
                0,
                device=device,
                peer=peer,
                timeout_s=timeout_s,
                pinned=pinned,
            )
            for name in LINKS
        )
        return cls(gradients, weights)

    @property
    def sent_bytes(self) -> int:
        return self._gradients.link.sent_bytes + self._weights.link.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._gradients.link.received_bytes + self._weights.link.received_bytes

    def close(self) -> None:
        self._gradients.link.close()
        self._weights.link.close()

    # Weights

    def wait_version(self, i: int, version: int, *, timeout_s: float) -> None:
        """As `Arena.wait_version`; free for a version that the bucket is known to hold."""
        if self._known.get(i, -1) >= version:
            return
        header = Header(
            Kind.WAIT_VERSION, i, version=version, timeout_ms=max(1, int(1000 * timeout_s))
        )
        with self._weights.asking(header, timeout_s) as answers:
            self._known[i] = next(answers)[0].version

    def read_places(self, i: int, version: int, places: Sequence[tuple[int, Tensor]]) -> None:
        """As `Arena.read_places`; places that follow each other are asked for at once."""
        for offset, outs in _runs(places):
            size = sum(out.numel() for out in outs)
            header = Header(Kind.READ, i, offset, size, version=version)
            with self._weights.asking(header) as answers:
                _fill(outs, (values for _, values in answers))

    def check_version(self, i: int, version: int) -> None:
        """The actor has checked what it sent."""

    # Gradients

    def count_before(self, version: int, *, rank: int) -> int:
        """As `Arena.count_before`."""
        header = Header(Kind.COUNT_BEFORE, detail=rank, version=version)
        with self._gradients.asking(header) as answers:
            return next(answers)[0].detail

    def write_gradient(self, i: int, offset: int, values: Tensor, *, accumulate: bool) -> None:
        """As `Arena.write_gradient`, done by the next `settle`. Any dtype but bf16 travels as
        fp32."""
        dtype = values.dtype if values.dtype == torch.bfloat16 else torch.float32
        number, detail = DTYPES.index(dtype), int(accumulate)
        with self._unanswered() as link:
            for part in values.split(BULK_BYTES // dtype.itemsize):
                link.room(dtype, part.numel()).copy_(part)
                link.send(Header(Kind.WRITE, i, offset, part.numel(), number, detail))
                offset += part.numel()

    def zero_gradient(self, i: int, start: int, stop: int) -> None:
        with self._unanswered() as link:
            link.send(Header(Kind.ZERO, i, start, stop - start))

    def square_gradient(self, i: int, start: int, stop: int) -> Tensor:
        """As `Arena.square_gradient`: taken in turn with the writes, and there after `settle`."""
        square = torch.full((), torch.nan, dtype=torch.float64)
        with self._unanswered() as link:
            link.send(Header(Kind.SQUARE, i, start, stop - start))
            self._squares.append(square)
        return square

    @contextmanager
    def _unanswered(self) -> Iterator[Link]:
        with self._gradients.lock:
            self._unsettled = True
            yield self._gradients.link

    def settle(self) -> None:
        """Return when the actor has done all that it was asked about gradients."""
        if not self._unsettled:
            return
        with self._gradients.asking(Header(Kind.SETTLE)) as answers:
            squares, self._squares = self._squares, []
            while True:
                got, values = next(answers)
                for square, value in zip(squares[: got.size], values, strict=True):
                    square.copy_(value)
                squares = squares[got.size :]
                if not squares:
                    break
        self._unsettled = False


class _Line:
    """A link and who may use it now."""

    def __init__(self, link: Link) -> None:
        self.link, self.lock = link, threading.Lock()

    @contextmanager
    def asking(
        self, header: Header, beyond_s: float = 0.0
    ) -> Iterator[Iterator[tuple[Header, Tensor]]]:
        """Sends a question; inside, the answers come one by one.

        Raises what the actor refuses with. `beyond_s` is how long the actor itself may wait.
        """
        with self.lock:
            self.link.send(header)
            yield self._answers(beyond_s)

    def _answers(self, beyond_s: float) -> Iterator[tuple[Header, Tensor]]:
        while True:
            header, payload = self.link.receive(timeout_s=self.link.timeout_s + beyond_s)
            if header.kind == Kind.REFUSED:
                text = bytes(payload.numpy()).decode()
                raise REFUSALS[header.detail](text)
            assert header.kind == Kind.DONE, f"{self.link.peer} answered {header}"
            yield header, payload


def _runs(places: Iterable[tuple[int, Tensor]]) -> list[tuple[int, list[Tensor]]]:
    """Places that follow each other in their bucket, put together: (offset, outs)."""
    runs: list[tuple[int, list[Tensor]]] = []
    end = -1
    for offset, out in places:
        if offset != end:
            runs.append((offset, []))
        runs[-1][1].append(out)
        end = offset + out.numel()
    return runs


def _fill(outs: Iterable[Tensor], pieces: Iterator[Tensor]) -> None:
    """Copies as many pieces, one after the other, as fill `outs`."""
    piece = torch.empty(0)
    for out in outs:
        done = 0
        while done < out.numel():
            if not len(piece):
                piece = next(pieces)
            size = min(len(piece), out.numel() - done)
            out[done : done + size].copy_(piece[:size])
            piece, done = piece[size:], done + size
