"""Which GPU fake tensors stand for: their strips allocate what the fused ones would there.

Fake CUDA tensors abort in autograd on a build without CUDA, so a simulation holds fake CPU tensors
and says here what they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Gpu:
    """An entry of triton.BLOCKS, and the multiprocessors or compute units of the device."""

    architecture: str
    processors: int


_gpu: ContextVar[Gpu | None] = ContextVar("_gpu", default=None)


@contextmanager
def simulated_gpu(architecture: str = "sm_90", processors: int = 132) -> Iterator[None]:
    """Fake tensors of any device stand for ones of this GPU; those of an H100 by default."""
    token = _gpu.set(Gpu(architecture, processors))
    try:
        yield
    finally:
        _gpu.reset(token)


def gpu_of(x: Tensor) -> Gpu | None:
    """The GPU that a fake `x` stands for; None for a tensor that is real, or stands for itself."""
    return _gpu.get() if isinstance(x, FakeTensor) else None
