"""AdamW over flat fp32 state, with rounded weights out: the update of one bucket.

reference.py says what it is. Large runs on the host take host.cpp, one pass over memory that is
compiled when it is first needed; the results are the same bits.
"""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatpeak.kernels.adamw import host, reference
from flatpeak.kernels.adamw.reference import Coefficients

__all__ = ["Coefficients", "adamw"]

# Below, seconds of compiling could not be made up for.
LEAST_COMPILED = 262_144


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    new_master: Tensor,
    new_exp_avg: Tensor,
    new_exp_avg_sq: Tensor,
    weights: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """Write the state after one update, and the masters in bf16 into `weights` unless it is None.

    All are contiguous [n], the state fp32, the gradient fp32 or bf16. New state may be the old
    tensors themselves. See `reference.adamw`.
    """
    large = len(master) >= LEAST_COMPILED and not master.is_cuda
    compiled = host.compiled() if large and not isinstance(master, FakeTensor) else None
    update = reference.adamw if compiled is None else compiled
    update(
        *(master, exp_avg, exp_avg_sq, gradient),
        *(new_master, new_exp_avg, new_exp_avg_sq, weights),
        coefficients,
    )
