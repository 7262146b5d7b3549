"""Compile Triton kernels for GPUs that need not be there, and read what resources they take.

The figures come from the assembler: for NVIDIA from the log of the `ptxas` that Triton ships, for
AMD from the metadata that LLVM puts into the assembly.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Resources:
    """Of a thread: registers, spilled ones, own memory. Of a program: shared memory."""

    registers: int
    spills: int
    scratch_bytes: int
    shared_bytes: int


def compile_for(
    architecture: str,
    kernel: Any,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    divisible: Collection[str],
    num_warps: int,
    num_stages: int,
) -> Resources:
    """Compile `kernel` for one of TARGETS as a launch would.

    Args:
        types: of every argument that is no constant, for instance `*bf16`, `i32` or `fp32`.
        constants: the values of all other arguments, constexpr or not.
        divisible: which arguments 16 divides, for pointers in bytes; launches find out by value.
    """
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        dict(constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.cache.dir = folder  # a cached binary would come without the assembler's log
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=TARGETS[architecture], options=options)
        assembly = compiled.asm.get("amdgcn")
    if assembly is None:
        found = ("Used {} registers", "{} bytes spill stores", "{} bytes stack frame")
        assembly, register_bytes = log.getvalue(), 4
    else:
        # Scalar registers spill into lanes of vector registers; if not, it shows in the last.
        found = (".vgpr_count: {}", ".vgpr_spill_count: {}", ".private_segment_fixed_size: {}")
        register_bytes = 1
    registers, spilled, scratch = (_number(pattern, assembly) for pattern in found)
    return Resources(registers, spilled // register_bytes, scratch, compiled.metadata.shared)


def _number(pattern: str, text: str) -> int:
    before, after = map(re.escape, pattern.split("{}"))
    found = re.search(rf"{before}\s*(\d+){after}", text)
    assert found, f"the assembler does not report {pattern!r}"
    return int(found[1])
