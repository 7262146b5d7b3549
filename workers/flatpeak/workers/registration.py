"""Host memory that CUDA knows: pages stay where they are, so copies run beside the computation."""

import math
import resource
from typing import Any

import torch
from torch import Tensor

from flatpeak.workers.errors import ClusterError

# One call holds the driver for as long as it takes to lock its pages; so others get their turn.
_CHUNK_BYTES = 1 << 30


class Registration:
    """The memory of a CPU tensor, registered piece by piece until `close`; all of it or none.

    `name` is what the memory is called in an error, `cudart` stands in for CUDA's runtime. Raises
    `ClusterError` when a piece cannot be registered, and leaves none that is.
    """

    def __init__(
        self, memory: Tensor, *, name: str, cudart: Any = None, chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        self._cudart: Any = torch.cuda.cudart() if cudart is None else cudart
        self._addresses: list[int] = []
        for piece in memory.view(torch.uint8).split(chunk_bytes):
            error = self._cudart.cudaHostRegister(piece.data_ptr(), piece.nbytes, 0)
            if int(error) != 0:
                done = len(self._addresses) * chunk_bytes
                self.close()
                raise self._refused(error, name, done, memory.nbytes)
            self._addresses.append(piece.data_ptr())

    def close(self) -> None:
        while self._addresses:
            error = self._cudart.cudaHostUnregister(self._addresses.pop())
            assert int(error) == 0, self._cudart.cudaGetErrorString(error)

    def _refused(self, error: Any, name: str, done: int, nbytes: int) -> ClusterError:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        return ClusterError(
            f"CUDA registers {done:,} of the {nbytes:,} bytes of {name} and then refuses: "
            f"{self._cudart.cudaGetErrorString(error)}. A process here may lock {allowed} bytes; "
            f"let it lock {nbytes:,} (ulimit -l {math.ceil(nbytes / 1024)}, or a container's "
            "memlock), or make the arena smaller with memory.boundaries.host_budget_bytes or more "
            "nodes"
        )
