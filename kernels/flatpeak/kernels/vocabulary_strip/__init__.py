"""The strip of the vocabulary loss: logits of a token tile against a vocabulary tile, folded.

On GPUs that triton.py has blocks for it is fused; everywhere else it is the plain torch of
reference.py, where shapes and meanings are described. Fake tensors take the reference too, unless
they stand for a GPU (simulated.py): then they allocate what is allocated there.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatpeak.kernels.vocabulary_strip import reference
from flatpeak.kernels.vocabulary_strip.reference import accumulate_, merge_
from flatpeak.kernels.vocabulary_strip.simulated import gpu_of, simulated_gpu

__all__ = ["accumulate_", "merge_", "simulated_gpu", "strip_residual", "strip_state"]


def strip_state(
    x: Tensor,
    w: Tensor,
    columns: Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    moments: bool = False,
) -> Tensor:
    """The fp32 state [t, 3], or [t, 5] with moments, of x [t, h] against a non-empty w [v, h]."""
    kernels = _kernels(x)
    return kernels.strip_state(x, w, columns, scale=scale, soft_cap=soft_cap, moments=moments)


def strip_residual(
    x: Tensor,
    w: Tensor,
    columns: Tensor,
    top: Tensor,
    p_scale: Tensor,
    y_scale: Tensor,
    flat: Tensor | None = None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """The gradient [t, v] by `scale x w^T`; fp32, or bf16 where fused for bf16 inputs."""
    scales = (top, p_scale, y_scale, flat)
    return _kernels(x).strip_residual(x, w, columns, *scales, scale=scale, soft_cap=soft_cap)


def _kernels(x: Tensor) -> Any:
    if gpu_of(x) is None and (not x.is_cuda or isinstance(x, FakeTensor)):
        return reference
    fused = _fused()
    return fused if fused is not None and fused.supports(x) else reference


@cache
def _fused() -> Any:
    # Imported late: Triton is not there on every system, and takes a while where it is.
    if find_spec("triton") is None:
        return None
    return import_module("flatpeak.kernels.vocabulary_strip.triton")
