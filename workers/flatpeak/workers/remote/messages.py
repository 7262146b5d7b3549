"""What the two sides of a link say to each other: a header of 64 bytes, then maybe a payload."""

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, Self

import torch

from flatpeak.workers.errors import ClusterError, RunFailed, WaitTimeout

HEADER = struct.Struct("<8q")
DTYPES = (None, torch.uint8, torch.float32, torch.bfloat16, torch.float64)
REFUSALS: tuple[type[RunFailed], ...] = (WaitTimeout, ClusterError, RunFailed)


class Kind(IntEnum):
    # Not answered.
    WRITE = 1
    ZERO = 2
    SQUARE = 3
    # Answered by DONE, READ and SETTLE by as many of them as it takes; or by one REFUSED.
    SETTLE = 4
    COUNT_BEFORE = 5
    WAIT_VERSION = 6
    READ = 7
    DONE = 8
    REFUSED = 9


@dataclass(frozen=True)
class Header:
    """Elements [offset, offset + size) of a bucket are meant.

    `dtype` is a place in `DTYPES`; where it is not 0, `size` elements of it follow as payload.
    `detail` is a WRITE's accumulate, the place of an error in `REFUSALS`, or the count asked for.
    """

    kind: int
    bucket: int = 0
    offset: int = 0
    size: int = 0
    dtype: int = 0
    detail: int = 0
    version: int = 0
    timeout_ms: int = 0

    @property
    def payload_dtype(self) -> torch.dtype | None:
        return DTYPES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        dtype = self.payload_dtype
        return 0 if dtype is None else self.size * dtype.itemsize

    def pack_into(self, place: memoryview) -> None:
        HEADER.pack_into(place, 0, *astuple(self))

    @classmethod
    def unpack_from(cls, place: memoryview) -> Self:
        fields: Any = HEADER.unpack_from(place)
        return cls(*fields)
