"""Compile the fused AdamW ahead of time and record its resources in compiled.json.

    python -m flatpeak.kernels.adamw_device.compile

Needs no GPU. Run it after every change of triton.py.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from triton import __version__ as triton_version
from triton import knobs

from flatpeak.kernels.adamw_device import triton as fused
from flatpeak.kernels.ahead_of_time import TARGETS, Resources, compile_for

RECORD = Path(__file__).with_name("compiled.json")
SOURCE = Path(__file__).with_name("triton.py")

ARRAYS = ("master", "exp_avg", "exp_avg_sq", "gradient", "weights")
# What 16 divides: a whole slot and its size, the slot alone, or neither, as for views of one.
EDGES = {"even": (*ARRAYS, "n"), "ragged": ARRAYS, "unaligned": ()}


@dataclass(frozen=True)
class Case:
    """One specialisation of the kernel that launches can ask for. No weights are those of fp32."""

    architecture: str
    gradient: str
    weights: str | None
    size: str
    edges: str

    @property
    def num_warps(self) -> int:
        return fused.num_warps(TARGETS[self.architecture].warp_size)


def cases() -> Iterator[Case]:
    dtypes = ("bf16", "fp32")
    for values in product(TARGETS, dtypes, (None, *dtypes), ("i32", "i64"), EDGES):
        yield Case(*values)


def measure(case: Case) -> Resources:
    kernel = fused._kernel
    constants = {"BLOCK": fused.BLOCK} | ({} if case.weights else {"weights": None})
    known = {
        "master": "*fp32",
        "exp_avg": "*fp32",
        "exp_avg_sq": "*fp32",
        "gradient": f"*{case.gradient}",
        "weights": f"*{case.weights}",
        "n": case.size,
    }
    types = {name: known.get(name, "fp32") for name in kernel.arg_names if name not in constants}
    return compile_for(
        case.architecture,
        kernel,
        types=types,
        constants=constants,
        divisible=set(EDGES[case.edges]) & types.keys(),
        num_warps=case.num_warps,
        num_stages=1,
    )


def source_hash() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def main() -> None:
    rows = []
    for case in cases():
        rows.append(asdict(case) | {"num_warps": case.num_warps} | asdict(measure(case)))
        print(rows[-1], file=sys.stderr)
    head = {
        "source_sha256": source_hash(),
        "triton": triton_version,
        "ptxas": knobs.nvidia.ptxas.version,
        "block": fused.BLOCK,
    }
    # One line a case, so that a change reads well.
    lines = ",\n".join(json.dumps(row) for row in rows)
    RECORD.write_text(json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
