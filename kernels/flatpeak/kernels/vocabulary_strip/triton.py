"""Fused strip: a token tile against a vocabulary tile, with the logits in registers only.

Same functions, shapes and meanings as in reference.py; the derivations are in README.md. A program
owns a block of tokens [bt] and of vocabulary rows [bv], and walks the hidden width in blocks [bh].
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flatpeak.kernels.vocabulary_strip.simulated import gpu_of

# Most blocks that a program folds into one fp32 state; rounding grows with them.
FOLDED_BLOCKS = 64
# Programs for each processor at least, where there is work for them: idle tails get shorter.
PROGRAMS_PER_PROCESSOR = 4
# Neighbouring programs share vocabulary blocks in groups of so many, for the cache between them.
GROUP = tl.constexpr(8)
# The least fp32 number.
LEAST = tl.constexpr(-3.4028234663852886e38)


@dataclass(frozen=True)
class Blocks:
    """Sides of a program's block, and what the compiler makes of it."""

    tokens: int
    vocabulary: int
    hidden: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Choices:
    """Blocks of one architecture: large ones where they fit into the registers.

    `large` is for bf16 without options, `medium` for bf16 with a scale, a soft cap, moments or a
    flat term and for fp16, whose residual is fp32. `small` is for fp32, which is multiplied without
    tensor cores, and for rows that 16 does not divide, which are loaded an element at a time.
    """

    large: Blocks
    medium: Blocks
    small: Blocks


# None spills a register in any case of compiled.json; no GPU has timed them yet.
BLOCKS = {
    "sm_80": Choices(
        large=Blocks(128, 256, 32, num_warps=8, num_stages=4),
        medium=Blocks(128, 128, 32, num_warps=8, num_stages=4),
        small=Blocks(64, 64, 16, num_warps=4, num_stages=3),
    ),
    "sm_90": Choices(
        large=Blocks(256, 128, 64, num_warps=8, num_stages=4),
        medium=Blocks(128, 128, 64, num_warps=8, num_stages=4),
        small=Blocks(64, 64, 16, num_warps=4, num_stages=3),
    ),
    "gfx942": Choices(
        large=Blocks(256, 128, 64, num_warps=8, num_stages=2),
        medium=Blocks(128, 128, 64, num_warps=8, num_stages=2),
        small=Blocks(64, 64, 32, num_warps=8, num_stages=2),
    ),
}
INTERPRETED = Blocks(16, 16, 16, num_warps=1, num_stages=1)


def supports(x: Tensor) -> bool:
    """Whether these kernels have blocks for the device and dtype of x."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    return x.dtype in dtypes and _architecture(x) in BLOCKS


def strip_state(
    x: Tensor,
    w: Tensor,
    columns: Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    moments: bool = False,
) -> Tensor:
    """As in reference.py."""
    (t, h), v = x.shape, w.shape[0]
    factor = scale / (soft_cap or 1.0)
    blocks = _blocks(x, w, optional=moments or scale != 1.0 or soft_cap is not None)
    span = span_of(t, v, blocks, _processors(x))
    splits = _ceil(v, span)
    partials = x.new_empty((splits, t, 5 if moments else 3), dtype=torch.float32)
    if t == 0:
        return partials[0]
    _launch(
        _state_kernel,
        (_ceil(t, blocks.tokens), splits),
        blocks,
        x,
        w,
        columns.contiguous(),
        partials,
        t,
        v,
        h,
        *x.stride(),
        *w.stride(),
        span,
        factor,
        soft_cap or 0.0,
        FACTOR=scale != 1.0 or soft_cap is not None,
        CAPPED=soft_cap is not None,
        MOMENTS=moments,
    )
    return _merged(partials)


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
    """As in reference.py, but bf16 for bf16 inputs, the dtype in which it is multiplied next."""
    (t, h), v = x.shape, w.shape[0]
    factor = scale / (soft_cap or 1.0)
    optional = flat is not None or scale != 1.0 or soft_cap is not None
    blocks = _blocks(x, w, optional=optional)
    residual = x.new_empty((t, v), dtype=residual_dtype(x.dtype))
    if t == 0:
        return residual
    _launch(
        _residual_kernel,
        (_ceil(t, blocks.tokens), _ceil(v, blocks.vocabulary)),
        blocks,
        x,
        w,
        columns.contiguous(),
        top.contiguous(),
        p_scale.contiguous(),
        y_scale.contiguous(),
        None if flat is None else flat.contiguous(),
        residual,
        t,
        v,
        h,
        *x.stride(),
        *w.stride(),
        factor,
        soft_cap or 0.0,
        FACTOR=scale != 1.0 or soft_cap is not None,
        CAPPED=soft_cap is not None,
        FLAT=flat is not None,
    )
    return residual


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    # fp16 stays wide: the upstream gradient of a mean underflows in it.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def span_of(t: int, v: int, blocks: Blocks, processors: int) -> int:
    """How many vocabulary rows, a multiple of the block, one program folds."""
    in_vocabulary = _ceil(v, blocks.vocabulary)
    wanted = _ceil(PROGRAMS_PER_PROCESSOR * processors, _ceil(t, blocks.tokens) or 1)
    splits = max(min(wanted, in_vocabulary), _ceil(in_vocabulary, FOLDED_BLOCKS))
    return _ceil(in_vocabulary, splits) * blocks.vocabulary


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _launch(
    kernel: Any, grid: tuple[int, int], blocks: Blocks, x: Tensor, *args: Any, **flags: bool
):
    if isinstance(x, FakeTensor):
        return
    with torch.cuda.device_of(x):
        kernel[grid](
            x,
            *args,
            **flags,
            BLOCK_T=blocks.tokens,
            BLOCK_V=blocks.vocabulary,
            BLOCK_H=blocks.hidden,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )


def _merged(partials: Tensor) -> Tensor:
    """The state of all splits of the vocabulary: [splits, t, 3 or 5] to [t, 3 or 5]."""
    if len(partials) == 1:
        return partials[0]
    state = partials.sum(0)  # y and s are final
    m, r = partials[..., 0], partials[..., 1]
    state[:, 0], top = m.max(0)
    shift = (m - state[:, 0]).masked_fill_(m == float("-inf"), 0.0)  # -inf - -inf would be NaN
    scale = shift.exp()
    z = scale * (r + 1.0)
    if state.shape[1] == 5:
        state[:, 4] = torch.addcmul(scale * partials[..., 4], shift, z).sum(0)
    top = top.unsqueeze(0)
    state[:, 1] = z.scatter_(0, top, r.gather(0, top)).sum(0)
    return state


def _blocks(x: Tensor, w: Tensor, *, optional: bool) -> Blocks:
    architecture = _architecture(x)
    if architecture is None:
        return INTERPRETED
    choices = BLOCKS[architecture]
    if x.dtype == torch.float32 or not (_aligned(x) and _aligned(w)):
        return choices.small
    return choices.large if x.dtype == torch.bfloat16 and not optional else choices.medium


def _aligned(matrix: Tensor) -> bool:
    row, column = matrix.stride()
    # A fake matrix has no address; where 16 divides its rows, every tile of it is aligned.
    address = 0 if isinstance(matrix, FakeTensor) else matrix.data_ptr()
    sizes = (matrix.shape[1], row, address)
    return column == 1 and all(size % 16 == 0 for size in sizes)


def _architecture(x: Tensor) -> str | None:
    """The entry of BLOCKS for the GPU of x, which may have none; None where there is no GPU."""
    gpu = gpu_of(x)
    if gpu is not None:
        return gpu.architecture
    return _architecture_of(x.device) if x.is_cuda else None


@cache
def _architecture_of(device: torch.device) -> str:
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    # All of compute capability 8 have the instructions of 8.0, and enough memory for its blocks.
    return "sm_80" if major == 8 else f"sm_{major}{minor}"


def _processors(x: Tensor) -> int:
    gpu = gpu_of(x)
    if gpu is not None:
        return gpu.processors
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


@triton.jit
def _state_kernel(
    x,
    w,
    columns,
    partials,
    t,
    v,
    h,
    x_row,
    x_column,
    w_row,
    w_column,
    span,
    factor,
    soft_cap,
    FACTOR: tl.constexpr,
    CAPPED: tl.constexpr,
    MOMENTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    split, block_t = _place()  # pyright: ignore[reportGeneralTypeIssues]
    first_row, first_column = block_t * BLOCK_T, split * span
    rows = first_row + tl.arange(0, BLOCK_T)
    column = _column(columns, tl.minimum(rows, t - 1), v)
    m = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    # With moments the sum over all but the maximum, else over all, of which 1 is taken at the end.
    r = tl.full((BLOCK_T,), -1.0 if MOMENTS else 0.0, tl.float32)
    y = tl.zeros((BLOCK_T,), tl.float32)
    s = tl.zeros((BLOCK_T,), tl.float32)
    e = tl.zeros((BLOCK_T,), tl.float32)
    strides = (x_row, x_column, w_row, w_column)
    for done in range(0, tl.minimum(span, v - first_column), BLOCK_V):
        start = first_column + done
        logits = _products(x, w, first_row, start, (t, v, h), strides, BLOCK_T, BLOCK_V, BLOCK_H)
        if FACTOR:
            logits *= factor
        if CAPPED:
            share, _ = _tanh(logits)
            logits = share * soft_cap
        vocabulary = start + tl.arange(0, BLOCK_V)
        inside = (vocabulary < v)[None, :]
        y += tl.sum(tl.where(vocabulary[None, :] == column[:, None], logits, 0.0), 1)
        if MOMENTS:
            # A probability of 0 counts 0, as often as its logarithm; NaN stays.
            logits = tl.where(logits < LEAST, LEAST, logits)
        top = tl.maximum(m, tl.max(tl.where(inside, logits, float("-inf")), 1))
        # Logits of -inf alone are as good as unseen: -inf - -inf would be NaN.
        finite = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.where(inside, tl.exp(logits - finite[:, None]), 0.0)
        keep = tl.exp(m - finite)
        if MOMENTS:
            # One maximum is left out of r, that of before if it is still one. None may count in e,
            # where its zero could be the rounding of a difference that was fused with a product.
            maxima = inside & (logits == top[:, None])
            equal = tl.sum(tl.where(maxima, 1.0, 0.0), 1)
            others = tl.where(maxima, 0.0, weights)
            z = keep * (r + 1.0)
            r = tl.where(m == top, r + equal, z + (equal - 1.0)) + tl.sum(others, 1)
            e = e * keep + tl.where(z > 0.0, m - top, 0.0) * z
            e += tl.sum(others * (logits - top[:, None]), 1)
            s += tl.sum(tl.where(inside, logits, 0.0), 1)
        else:
            r = r * keep + tl.sum(weights, 1)
        m = top
    WIDTH: tl.constexpr = 5 if MOMENTS else 3
    state = partials + (split.to(tl.int64) * t + rows) * WIDTH
    tl.store(state, m, mask=rows < t)
    tl.store(state + 1, r if MOMENTS else r - 1.0, mask=rows < t)
    tl.store(state + 2, y, mask=rows < t)
    if MOMENTS:
        tl.store(state + 3, s, mask=rows < t)
        tl.store(state + 4, e, mask=rows < t)


@triton.jit
def _residual_kernel(
    x,
    w,
    columns,
    top,
    p_scale,
    y_scale,
    flat,
    residual,
    t,
    v,
    h,
    x_row,
    x_column,
    w_row,
    w_column,
    factor,
    soft_cap,
    FACTOR: tl.constexpr,
    CAPPED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    block_v, block_t = _place()  # pyright: ignore[reportGeneralTypeIssues]
    first_row, start = block_t * BLOCK_T, block_v * BLOCK_V
    strides = (x_row, x_column, w_row, w_column)
    logits = _products(x, w, first_row, start, (t, v, h), strides, BLOCK_T, BLOCK_V, BLOCK_H)
    if FACTOR:
        logits *= factor
    if CAPPED:
        share, slope = _tanh(logits)
        logits = share * soft_cap
    row, vocabulary = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_V)
    rows_read = tl.minimum(first_row + row, t - 1)
    column = _column(columns, rows_read, v) - start
    gradient = tl.exp(logits - tl.load(top + rows_read)[:, None])
    gradient *= tl.load(p_scale + rows_read)[:, None]
    target = tl.load(y_scale + rows_read)[:, None]
    gradient -= tl.where(vocabulary[None, :] == column[:, None], target, 0.0)
    if FLAT:
        gradient -= tl.load(flat + rows_read)[:, None]
    if CAPPED:
        gradient *= slope
    # Only the distance between blocks may need more than 32 bits.
    residual += first_row.to(tl.int64) * v + start
    place = row[:, None] * v + vocabulary[None, :]
    inside = (row < t - first_row)[:, None] & (vocabulary < v - start)[None, :]
    tl.store(residual + place, gradient.to(residual.dtype.element_ty), mask=inside)


@triton.jit
def _place():
    """This program's block along the grid's second axis and along its first."""
    return tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP
    )


@triton.jit
def _column(columns, rows_read, v):
    """The targets as int32, -1 where they are outside [0, v): an ignored id may be any int64."""
    column = tl.load(columns + rows_read)
    return tl.where((column >= 0) & (column < v), column, -1).to(tl.int32)


@triton.jit
def _products(
    x,
    w,
    first_row,
    start,
    shape,
    strides,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """`x w^T` [bt, bv] in fp32. Rows beyond the ends repeat the last one and mean nothing."""
    t, v, h = shape
    x_row, x_column, w_row, w_column = strides
    row = tl.minimum(tl.arange(0, BLOCK_T), t - 1 - first_row)
    vocabulary = tl.minimum(tl.arange(0, BLOCK_V), v - 1 - start)
    hidden = tl.arange(0, BLOCK_H)
    x += first_row.to(tl.int64) * x_row
    w += start.to(tl.int64) * w_row
    x_block = row[:, None] * x_row + hidden[None, :] * x_column
    w_block = vocabulary[None, :] * w_row + hidden[:, None] * w_column
    products = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for done in range(0, h, BLOCK_H):
        inside = hidden < h - done
        a = tl.load(x + x_block, mask=inside[None, :], other=0.0)
        b = tl.load(w + w_block, mask=inside[:, None], other=0.0)
        products = tl.dot(a, b, products, input_precision="ieee")
        x += BLOCK_H * x_column
        w += BLOCK_H * w_column
    return products


@triton.jit
def _tanh(u):
    """tanh u and 1 - tanh^2 u, both to about a unit in the last place wherever u is.

    With rest = 1 - |tanh u|: near 0 that difference cancels in tanh, and far from it in the square.
    """
    q = u * u
    # (tanh(u) / u - 1) / q, fitted in least squares at Chebyshev points of 0 <= q <= 1.
    series = -0.00042375 * q + 0.00251968
    series = series * q - 0.00822938
    series = series * q + 0.02166560
    series = series * q - 0.05393609
    series = series * q + 0.13333140
    series = series * q - 0.33333331
    near = u + u * (q * series)
    decay = tl.exp(-2.0 * tl.abs(u))
    rest = 2.0 * decay / (1.0 + decay)
    far = tl.where(u < 0.0, rest - 1.0, 1.0 - rest)
    return tl.where(q < 1.0, near, far), rest * (2.0 - rest)
