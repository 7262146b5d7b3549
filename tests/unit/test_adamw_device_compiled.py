"""The record of the fused AdamW's ahead-of-time compilation: complete, present, without spills."""

import json
from dataclasses import asdict
from functools import cache

import pytest
import triton

from flatpeak.kernels.adamw_device.compile import RECORD, Case, cases, measure, source_hash
from flatpeak.kernels.adamw_device.triton import BLOCK
from flatpeak.kernels.ahead_of_time import TARGETS

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 8.0 and 9.0.
REGISTERS_OF_A_PROCESSOR, WARPS_OF_A_PROCESSOR = 65_536, 64


@cache
def record() -> dict:
    return json.loads(RECORD.read_text())


def test_the_record_is_of_the_present_source():
    assert record()["source_sha256"] == source_hash(), (
        "triton.py changed: run python -m flatpeak.kernels.adamw_device.compile"
    )
    assert record()["block"] == BLOCK


def test_the_record_has_every_case():
    keys = (*Case.__dataclass_fields__, "num_warps")
    recorded = [{key: row[key] for key in keys} for row in record()["cases"]]
    assert recorded == [asdict(case) | {"num_warps": case.num_warps} for case in cases()]


@pytest.mark.parametrize("architecture", TARGETS)
def test_nothing_spills_and_half_of_the_warps_find_registers(architecture: str):
    rows = [row for row in record()["cases"] if row["architecture"] == architecture]
    assert rows
    for row in rows:
        assert row["spills"] == row["scratch_bytes"] == 0, row
        if architecture.startswith("sm_"):
            # What hides the memory's latency are warps with loads under way.
            warps = REGISTERS_OF_A_PROCESSOR // (32 * row["registers"])
            assert warps >= WARPS_OF_A_PROCESSOR // 2, row


@pytest.mark.skipif(triton.__version__ != record()["triton"], reason="another compiler")
@pytest.mark.parametrize("architecture", TARGETS)
def test_compiling_again_gives_what_is_recorded(architecture: str):
    case = Case(architecture, "bf16", "bf16", "i32", "ragged")
    recorded = next(row for row in record()["cases"] if asdict(case).items() <= row.items())
    assert asdict(measure(case)).items() <= recorded.items()
