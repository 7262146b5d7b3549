"""The update of reference.py in one threaded pass over host memory, compiled from host.cpp."""

import logging
from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from flatpeak.kernels.adamw import reference
from flatpeak.kernels.adamw.build import CannotBuild, load_library
from flatpeak.kernels.adamw.reference import Coefficients

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("host.cpp")


class _Coefficients(Structure):
    """As in host.cpp."""

    _fields_ = [
        (name, c_float)
        for name in (
            *("clip_factor", "keep", "weight1", "beta2", "weight2"),
            *("correction", "eps", "step"),
        )
    ]


@cache
def compiled() -> Callable[..., None] | None:
    """`reference.adamw` in one pass, for contiguous host tensors; None where it cannot be had.

    The first call takes seconds where the compiler has to run, and logs the reason of a None.
    """
    try:
        update = bind(load_library(SOURCE))
    except CannotBuild as error:
        log.warning("AdamW runs in plain torch, which takes several times as long: %s", error)
        return None
    if not agrees(update):
        log.warning(
            "AdamW runs in plain torch, which takes several times as long: here it rounds "
            "otherwise than host.cpp, and results may not depend on who has a compiler"
        )
        return None
    return update


def bind(library: CDLL) -> Callable[..., None]:
    """The library's pass under the arguments of `reference.adamw`."""
    function = library.flatpeak_adamw
    function.restype = None
    function.argtypes = [
        *(c_int64, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ]

    def update(
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        new_master: Tensor,
        new_exp_avg: Tensor,
        new_exp_avg_sq: Tensor,
        weights: Tensor | None,
        c: Coefficients,
    ) -> None:
        old, new = (master, exp_avg, exp_avg_sq), (new_master, new_exp_avg, new_exp_avg_sq)
        for tensor in (*old, *new):
            assert tensor.dtype == torch.float32, tensor.dtype
        rounded = None
        if weights is not None:
            assert weights.dtype == torch.bfloat16, weights.dtype
            rounded = _address(weights, len(master))
        numbers = _Coefficients(
            c.clip_factor,
            c.keep,
            1 - c.beta1,
            c.beta2,
            1 - c.beta2,
            c.correction,
            c.eps,
            -c.step_size,
        )
        function(
            len(master),
            torch.get_num_threads(),
            *(_address(tensor, len(master)) for tensor in (*old, gradient)),
            _IS_BF16[gradient.dtype],
            *(_address(tensor, len(master)) for tensor in new),
            rounded,
            byref(numbers),
        )

    return update


_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


def _address(tensor: Tensor, size: int) -> int:
    assert tensor.shape == (size,), f"shape {tuple(tensor.shape)} beside {size} masters"
    assert tensor.is_contiguous(), f"strides {tensor.stride()}"
    assert tensor.device.type == "cpu", tensor.device
    return tensor.data_ptr()


def agrees(update: Callable[..., None]) -> bool:
    """Whether `update` gives the bits of the reference, also for numbers out of the ordinary."""
    size = 4099
    make = torch.Generator().manual_seed(0)
    for beta1, dtype in product((0.9, 0.3), _IS_BF16):
        # Half of them are any bits at all: subnormal, huge, infinite, no numbers.
        wild = torch.randint(-(2**31), 2**31, (4, size // 2), generator=make, dtype=torch.int32)
        tame = torch.randn(4, size - size // 2, generator=make)
        master, exp_avg, exp_avg_sq, gradient = torch.cat([wild.view(torch.float32), tame], dim=1)
        state = master, exp_avg, exp_avg_sq.abs(), gradient.to(dtype)
        coefficients = Coefficients.of(
            updates=3, lr=0.01, betas=(beta1, 0.95), eps=1e-8, decay=0.1, clip_factor=0.7
        )
        results = []
        for way in (reference.adamw, update):
            new = torch.empty(size), torch.empty(size), torch.empty(size)
            weights = torch.empty(size, dtype=torch.bfloat16)
            way(*state, *new, weights, coefficients)
            results.append((*new, weights))
        if not all(map(same_bits, *results)):
            return False
    return True


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit; what is no number equals any other such."""
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
