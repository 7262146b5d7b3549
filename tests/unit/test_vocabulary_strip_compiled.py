"""The record of the strip's ahead-of-time compilation: complete, present, and without spills."""

import json
from dataclasses import asdict
from functools import cache

import pytest
import triton

from flatpeak.kernels.vocabulary_strip.compile import RECORD, Case, cases, measure, source_hash
from flatpeak.kernels.vocabulary_strip.triton import BLOCKS

KIB = 1024
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 163 KiB for 8.0,
# but 99 KiB for 8.6 and 8.9, which use the same blocks; 227 KiB for 9.0. The local data share of
# CDNA 3 has 64 KiB.
SHARED_BYTES = {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "gfx942": 64 * KIB}
REGISTERS_OF_A_PROCESSOR = 65_536


@cache
def record() -> dict:
    return json.loads(RECORD.read_text())


def test_the_record_is_of_the_present_source():
    assert record()["source_sha256"] == source_hash(), (
        "triton.py changed: run python -m flatpeak.kernels.vocabulary_strip.compile"
    )


def test_the_record_has_every_case():
    keys = ("architecture", "kernel", "dtype", "edges", "logits", "second_option", "blocks")
    recorded = [{key: row[key] for key in keys} for row in record()["cases"]]
    assert recorded == [asdict(case) | {"blocks": asdict(case.blocks)} for case in cases()]


@pytest.mark.parametrize("architecture", BLOCKS)
def test_nothing_spills_and_everything_fits(architecture: str):
    for row in record()["cases"]:
        if row["architecture"] == architecture:
            assert row["spills"] == row["scratch_bytes"] == 0, row
            assert row["shared_bytes"] <= SHARED_BYTES[architecture], row
            threads = 32 * row["blocks"]["num_warps"]
            if architecture.startswith("sm_"):
                assert row["registers"] * threads <= REGISTERS_OF_A_PROCESSOR, row


@pytest.mark.skipif(triton.__version__ != record()["triton"], reason="another compiler")
@pytest.mark.parametrize("kernel", ["state", "residual"])
@pytest.mark.parametrize("architecture", BLOCKS)
def test_compiling_again_gives_what_is_recorded(architecture: str, kernel: str):
    case = Case(architecture, kernel, "fp32", "even", "plain", second_option=False)
    recorded = next(row for row in record()["cases"] if asdict(case).items() <= row.items())
    assert asdict(measure(case)).items() <= recorded.items()


@pytest.mark.parametrize("kernel", ["state", "residual"])
def test_a_single_token_row_and_element_compile(kernel: str):
    case = Case("sm_90", kernel, "bf16", "unaligned", "capped", second_option=True)
    ones = dict.fromkeys(("t", "v", "h", "x_row", "w_row"), 1)
    assert measure(case, **ones).spills == 0
