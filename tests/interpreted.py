"""Triton kernels on the CPU: one warm process in which Triton interprets them.

Triton decides at its import whether to interpret, so the tests' own process stays as it is.
Uninitialised memory is NaN there.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any
from unittest import mock

import cloudpickle


def interpreted(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` as the interpreting process computes it."""
    # It cannot import a test module: ship its functions by value.
    cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
    return cloudpickle.loads(_process().submit(_call, cloudpickle.dumps((fn, args))).result())


@cache
def _process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, get_context("spawn"), _prepare)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        pool.submit(int).result()  # starts it: it may import Triton before it is prepared
    return pool


def _call(payload: bytes) -> bytes:
    fn, args = cloudpickle.loads(payload)
    return cloudpickle.dumps(fn(*args))


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what is not initialised
    _mend_bf16()


def _mend_bf16() -> None:
    """Let the interpreter round to bf16 and multiply it; Triton 3.7 truncates, and takes bits."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended_cast(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, src, dst_type)

    def mended_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.cast_impl = mended_cast
    InterpreterBuilder.create_dot = mended_dot
