"""What `flatpeak submit` shows of the run that it has sent."""

import json
import sys
from contextlib import nullcontext

from flatpeak.controller.display import display_for
from flatpeak.controller.jobs.submitted import SubmittedRun
from flatpeak.controller.runs import RunState


def show_submitted(run: SubmittedRun, *, as_json: bool) -> None:
    said = {"run": run.name, "job": run.job, "address": run.address, "folder": run.folder}
    if as_json:
        print(json.dumps({"type": "submitted", **said}), flush=True)
        return
    print(f"submitted {run.name} to {run.address} as {run.job}, its folder there is {run.folder}")
    print(f"see it with: flatpeak watch {run.name} --address {run.address}", flush=True)


def show_to_end(run: SubmittedRun, *, events: bool, as_json: bool) -> None:
    """Returns when the run is done, with its `events` shown or not.

    Raises the error that it ended with, KeyboardInterrupt if it was stopped or this process is.
    """
    display = display_for(steps=run.steps, json=as_json)
    try:
        with display if events else nullcontext():
            for happened in run.follow():
                if events and happened is not None:
                    display(happened)
    except KeyboardInterrupt:
        stop = f"flatpeak stop {run.name} --address {run.address}"
        print(f"flatpeak: the run goes on; end it with: {stop}", file=sys.stderr)
        raise
    if (error := run.error()) is not None:
        raise error
    if run.status().state is RunState.INTERRUPTED:
        raise KeyboardInterrupt
    if (summary := run.summary()) is not None:
        display.summary(summary)
