"""Compile the strip's kernels ahead of time and record their resources in compiled.json.

    python -m flatpeak.kernels.vocabulary_strip.compile

Needs no GPU, and some minutes. Run it after every change of triton.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from triton import __version__ as triton_version
from triton import knobs

from flatpeak.kernels.ahead_of_time import Resources, compile_for
from flatpeak.kernels.vocabulary_strip import triton as strip

RECORD = Path(__file__).with_name("compiled.json")
SOURCE = Path(__file__).with_name("triton.py")

KERNELS = {"state": strip._state_kernel, "residual": strip._residual_kernel}
# The constant that stands for each option, besides what is done to the products.
SECOND_OPTION = {"state": "MOMENTS", "residual": "FLAT"}
# Which sizes and addresses 16 divides: all, those that decide how rows are loaded, or none.
SCALARS = ("columns", "top", "p_scale", "y_scale", "flat")
EDGES = {
    "even": ("t", "v", *SCALARS, "h", "x", "x_row", "w", "w_row"),
    "ragged": ("h", "x", "x_row", "w", "w_row"),
    "unaligned": (),
}


# What logits are made of products by: FACTOR and CAPPED.
LOGITS = {"plain": (False, False), "scaled": (True, False), "capped": (True, True)}


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel that launches can ask for."""

    architecture: str
    kernel: str
    dtype: str
    edges: str
    logits: str
    second_option: bool

    @property
    def blocks(self) -> strip.Blocks:
        choices = strip.BLOCKS[self.architecture]
        if self.dtype == "fp32" or self.edges == "unaligned":
            return choices.small
        optional = self.logits != "plain" or self.second_option
        return choices.large if self.dtype == "bf16" and not optional else choices.medium


def cases() -> Iterator[Case]:
    dtypes, flags = ("bf16", "fp16", "fp32"), (False, True)
    for values in product(strip.BLOCKS, KERNELS, dtypes, EDGES, LOGITS, flags):
        yield Case(*values)


def measure(case: Case, **sizes: int) -> Resources:
    """Compile one case; `sizes` are compiled in, as Triton does with those that are 1."""
    kernel, blocks = KERNELS[case.kernel], case.blocks
    factor, capped = LOGITS[case.logits]
    constants = {
        **sizes,
        "x_column": 1,
        "w_column": 1,
        "FACTOR": factor,
        "CAPPED": capped,
        SECOND_OPTION[case.kernel]: case.second_option,
        "BLOCK_T": blocks.tokens,
        "BLOCK_V": blocks.vocabulary,
        "BLOCK_H": blocks.hidden,
    }
    if case.kernel == "residual" and not case.second_option:
        constants["flat"] = None
    types = _types(case, [name for name in kernel.arg_names if name not in constants])
    # A span is a multiple of a block; what a launch allocates is aligned.
    divisible = {"span", "partials", "residual", *EDGES[case.edges]} & types.keys()
    return compile_for(
        case.architecture,
        kernel,
        types=types,
        constants=constants,
        divisible=divisible,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def _types(case: Case, names: list[str]) -> dict[str, str]:
    known = {
        "x": f"*{case.dtype}",
        "w": f"*{case.dtype}",
        "columns": "*i64",
        "residual": "*bf16" if case.dtype == "bf16" else "*fp32",
        "factor": "fp32",
        "soft_cap": "fp32",
    }
    known |= dict.fromkeys(("partials", "top", "p_scale", "y_scale", "flat"), "*fp32")
    return {name: known.get(name, "i32") for name in names}


def source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> None:
    source, wanted = source_hash(), list(cases())
    found = []
    with ProcessPoolExecutor() as pool:
        for case, resources in zip(wanted, pool.map(measure, wanted), strict=True):
            print(case, resources, file=sys.stderr)
            found.append(resources)
    rows = [
        asdict(case) | {"blocks": asdict(case.blocks)} | asdict(resources)
        for case, resources in zip(wanted, found, strict=True)
    ]
    head = {
        "source_sha256": source,
        "triton": triton_version,
        "ptxas": knobs.nvidia.ptxas.version,
    }
    # One line a case, so that a change of blocks reads well.
    lines = ",\n".join(json.dumps(row) for row in rows)
    RECORD.write_text(json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
