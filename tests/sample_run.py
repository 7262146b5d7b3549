"""Records of a run that nobody made."""

from flatpeak.controller.runs import RunInfo, RunState, StepRecord

INFO = RunInfo(
    run="first",
    host="here",
    pid=1,
    process_start="x",
    state=RunState.DONE,
    steps=9,
    started=0.0,
    ended=9.0,
)
STEP = StepRecord(
    step=1,
    loss=2.5,
    grad_norm=1.5,
    lr=1e-3,
    tokens=640,
    tokens_per_s=320.0,
    step_seconds=2.0,
    peak_bytes={"dispatch": 3 * 2**20, "attention": 2**20, "total": 5 * 2**20},
    device_budget_bytes=10 * 2**20,
    planned_peak_bytes={"attention": 2 * 2**20},
    dispatch={
        "imbalance_before": 2.0,
        "imbalance_after": 1.1,
        "planned_bytes": 2.0 * 2**20,
        "budget_bytes": 4.0 * 2**20,
    },
    optimizer={"exposed_s": 0.1},
    first_sample=0,
    last_sample=7,
)
