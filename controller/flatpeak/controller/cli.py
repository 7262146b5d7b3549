"""The `flatpeak` command: reads arguments, calls one function a command, maps errors to exits.

Exit codes: 0 done; 2 bad input, with one clear message; 3 does not fit; 4 the run failed;
130 interrupted. With `--json` every line of standard output is one JSON object, and an error is
`{"error": {"kind", "message", "exit_code"}}` there beside the text on standard error.

Torch and Ray are imported by the commands that need them, so that the others answer at once.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flatpeak.controller.signals import terminated_as_interrupted
from flatpeak.workers.errors import FlatpeakError, InputError, RunFailed

INTERRUPTED = 130

app = typer.Typer(
    name="flatpeak",
    help="Train long-context MoE models on Ray with every memory peak fixed at launch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on standard output.")]
RunsDir = Annotated[Path, typer.Option(help="Directory of the run folders.")]
LocalOrNot = Annotated[
    Path | None, typer.Option("--runs-dir", help="Directory of the run folders; ./runs without.")
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Dashboard of a cluster that runs are submitted to, like http://HEAD:8265; else "
        "$RAY_API_SERVER_ADDRESS, or $RAY_ADDRESS with http. The token is found where Ray has it.",
    ),
]
SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, like train.steps=20."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an earlier run of this name.")]
Degree = Annotated[
    str | None, typer.Option(help="That degree of the new workers, or auto; else as in the job.")
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")]


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where the job file goes.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a starter job file in which every setting is explained."""
    from flatpeak.controller.spec_file import starter_yaml

    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(starter_yaml())
    except FileExistsError:
        raise InputError(f"{path} exists; --force replaces it") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    print(f"wrote {path}; start it with: flatpeak train {path}")


@app.command()
def train(
    spec: SpecFile, overrides: Overrides = None, resume: Resume = False, as_json: Json = False
) -> None:
    """Run a job from here until it is done."""
    from flatpeak.controller.display import display_for
    from flatpeak.controller.spec_file import load_spec

    job = load_spec(spec, _overrides(overrides, resume))

    # The display has its stream by then; Ray would print there what it has to say of a death.
    with (
        display_for(steps=job.train.steps, json=as_json) as display,
        redirect_stdout(sys.stderr),
    ):
        display.note("loading torch and Ray, checking the job")

        from flatpeak.controller import launch

        summary = launch.train(job, on_event=display)
    display.summary(summary)


@app.command()
def submit(
    spec: SpecFile,
    overrides: Overrides = None,
    resume: Resume = False,
    address: Address = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the run has ended.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait, and show the run like `train` does.")
    ] = False,
    python: Annotated[
        str, typer.Option(metavar="COMMAND", help="The cluster's Python, as its head calls it.")
    ] = "python",
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="For all processes of the run; NAME alone takes it from here.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a job on a cluster, with the code of here; paths in SPEC are paths there.

    With --wait or --follow the exit code is that of the run, and Ctrl-C leaves it running.
    """
    from flatpeak.controller.jobs.access import job_address
    from flatpeak.controller.jobs.request import ON_CLUSTER, check_paths, given_environment
    from flatpeak.controller.spec_file import load_spec

    job = load_spec(spec, [*_overrides(overrides, resume), *ON_CLUSTER])
    check_paths(job)
    environment = given_environment(env or [], os.environ)
    if (server := job_address(address, os.environ)) is None:
        raise InputError("where to? give the cluster's dashboard by --address http://HEAD:8265")

    from flatpeak.controller.jobs.client import JobClient
    from flatpeak.controller.jobs.show import show_submitted, show_to_end
    from flatpeak.controller.jobs.submit import submit as send

    run = send(job, JobClient(server), python=python, environment=environment)
    show_submitted(run, as_json=as_json)
    if wait or follow:
        show_to_end(run, events=follow, as_json=as_json)


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="One run; all of them without.")
    ] = None,
    runs_dir: LocalOrNot = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Say which runs there are, whether they live and how far they are."""
    from flatpeak.controller.observed import all_reports, find_run, report_of
    from flatpeak.controller.strict_json import to_json

    where = _where(runs_dir, address)
    reports = all_reports(where) if run is None else [report_of(find_run(where, run))]
    if as_json:
        for report in reports:
            print(to_json(report))
    elif not reports:
        print(f"no runs in {where}")
    else:
        _print_table(reports)


@app.command()
def logs(
    run: RunName,
    actor: Annotated[str | None, typer.Option(help="One actor, like worker-0.")] = None,
    tail: Annotated[int, typer.Option(min=1, help="Lines of each log.")] = 20,
    runs_dir: LocalOrNot = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Show the last lines of a run's logs; of a submitted run, what its driver said."""
    from flatpeak.controller.observed import find_run

    found = find_run(_where(runs_dir, address), run)
    tails, folder = found.tails(tail), found.status().folder
    if actor is not None and actor not in tails:
        raise InputError(
            f"no log of {actor!r} can be read from here, there are: {', '.join(tails) or 'none'}; "
            f"those of actors are in {folder}/logs"
        )
    chosen = tails if actor is None else {actor: tails[actor]}
    for name, lines in chosen.items():
        if len(chosen) > 1 and not as_json:
            print(f"== {name}")
        for line in lines:
            print(json.dumps({"actor": name, "line": line}) if as_json else line)
    if not chosen:
        print(f"no logs in {folder}/logs", file=sys.stderr)


@app.command()
def stop(
    run: RunName,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait.")] = 60.0,
    runs_dir: LocalOrNot = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """End a run that is driven from this machine, or was submitted, and wait until it is gone."""
    from flatpeak.controller.observed import find_run

    found = find_run(_where(runs_dir, address), run)
    if not found.status().over:  # it has an update to finish and a snapshot to write
        print(f"{run}: stopping, which may take {timeout:g} s", file=sys.stderr, flush=True)
    else:
        print(f"{run} had ended already", file=sys.stderr)
    state = found.stop(timeout_s=timeout)
    print(json.dumps({"run": run, "state": str(state)}) if as_json else f"{run}: {state}")


@app.command()
def scale(
    run: RunName,
    optimizers: Annotated[
        int | None, typer.Option(help="Optimizer actors that there are to be.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers that there are to be.")] = None,
    sequence: Degree = None,
    expert: Degree = None,
    vocabulary: Degree = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait.")] = 600.0,
    runs_dir: RunsDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Change the number of optimizer actors or of workers while a run trains, between two steps.

    Needs the run's folder, also of one that was submitted: --runs-dir says where it is.
    """
    from flatpeak.controller.display import event_line
    from flatpeak.controller.runs import RunFolder
    from flatpeak.controller.scale_requests import scale_request, scale_run
    from flatpeak.controller.strict_json import to_json

    request = scale_request(
        optimizers=optimizers,
        workers=workers,
        degrees={"sequence": sequence, "expert": expert, "vocabulary": vocabulary},
    )
    scaled = scale_run(RunFolder.open(runs_dir, run), request, timeout_s=timeout)
    print(to_json({"run": run, **scaled.detail}) if as_json else f"{run}: {event_line(scaled)}")


@app.command()
def watch(
    run: RunName,
    runs_dir: LocalOrNot = None,
    address: Address = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a local run.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Show a run as it goes: peaks against their bounds, loss, speed, events."""
    from flatpeak.controller.observed import wait_for_run
    from flatpeak.controller.watch import watch as show

    show(wait_for_run(_where(runs_dir, address), run, timeout_s=wait), as_json=as_json)


def _overrides(given: list[str] | None, resume: bool) -> list[str]:
    return [*(given or []), *(["resume=true"] if resume else [])]


def _where(runs_dir: Path | None, address: str | None) -> Path | str:
    """The folder of runs, or the address of the cluster that they were submitted to."""
    from flatpeak.controller.jobs.access import job_address

    if runs_dir is not None:
        if address is not None:
            raise InputError("--runs-dir is for runs of here and --address for a cluster's")
        return runs_dir
    return job_address(address, os.environ) or Path("runs")


@app.command()
def report(run: RunName, runs_dir: RunsDir = Path("runs"), as_json: Json = False) -> None:
    """Write a run's report, one HTML file; a run writes it at its end by itself."""
    from flatpeak.controller.report import write_report
    from flatpeak.controller.runs import RunFolder

    _say("wrote", [str(write_report(RunFolder.open(runs_dir, run)))], as_json=as_json)


@app.command()
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where to: new, or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of this step; the newest whole one without.")
    ] = None,
    dtype: Annotated[
        Literal["train", "float32", "bfloat16"],
        typer.Option(help="Of the weights; train is what the run trains in."),
    ] = "train",
    optimizer_state: Annotated[
        bool, typer.Option("--optimizer-state", help="Masters and moments too, in fp32.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Write a snapshot of a run as a Hugging Face model that transformers loads."""
    from flatpeak.controller.runs import RunFolder

    folder = RunFolder.open(runs_dir, run)

    from flatpeak.controller.export import export_run

    done = export_run(folder, to, step=step, dtype=dtype, optimizer_state=optimizer_state)
    if as_json:
        print(json.dumps(asdict(done)))
        return
    for text in done.skipped:
        print(f"flatpeak: {text}", file=sys.stderr)
    size = f"{done.parameters:,} parameters in {done.dtype}"
    print(f"wrote {done.folder}: {size}, step {done.step} of {done.run}")


boards = typer.Typer(help="Grafana dashboards of the peaks: as files, or pushed.")
app.add_typer(boards, name="dashboards", no_args_is_help=True)
BoardsDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the JSON files.")]


@boards.command("render")
def render_boards(folder: BoardsDir = Path("dashboards"), as_json: Json = False) -> None:
    """Write the dashboards as JSON, for provisioning or import by hand."""
    from flatpeak.controller.dashboards import render_files

    _say("wrote", [str(path) for path in render_files(folder)], as_json=as_json)


@boards.command("check")
def check_boards(folder: BoardsDir = Path("dashboards"), as_json: Json = False) -> None:
    """Say which files are not what this version renders; exit 2 if any."""
    from flatpeak.controller.dashboards import check_files

    if differing := check_files(folder):
        names = ", ".join(map(str, differing))
        raise InputError(
            f"missing, or not as this version renders them: {names}; write them again by "
            f"flatpeak dashboards render {folder}"
        )
    _say("as rendered", [str(folder)], as_json=as_json)


@boards.command("push")
def push_boards(
    url: Annotated[
        str, typer.Option(envvar="GRAFANA_URL", help="Where a browser opens Grafana.")
    ] = "http://localhost:3000",
    as_json: Json = False,
) -> None:
    """Put the dashboards into Grafana; the token is taken from GRAFANA_TOKEN."""
    from flatpeak.controller.dashboards import dashboards
    from flatpeak.controller.dashboards.grafana import Grafana, token_from_environment

    grafana = Grafana(url, token_from_environment())
    for each in dashboards():
        _say("pushed" if grafana.push(each) else "unchanged", [each["title"]], as_json=as_json)


def _say(what: str, names: Sequence[str], *, as_json: bool) -> None:
    for name in names:
        print(json.dumps({"result": what, "name": name}) if as_json else f"{what}: {name}")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # the frame knows more: --help is an option of ours below
    }
)
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Module in tests/benchmarks.")
    ] = None,
    as_json: Json = False,
    show_help: Annotated[
        bool, typer.Option("--help", "-h", help="Show the benches, or the options of NAME.")
    ] = False,
) -> None:
    """Run a benchmark of a source checkout; more options are its own, like --ranks 4."""
    from flatpeak.controller.bench import BENCHES, describe_bench, describe_benches, run_bench
    from flatpeak.controller.strict_json import to_json

    if name is None:
        if not show_help:
            raise InputError(f"name a bench of {BENCHES}; flatpeak bench --help lists them")
        print(context.get_help())
        try:
            print(describe_benches())
        except InputError as none:  # outside a checkout, which is no reason to refuse help
            print(none)
        return
    if show_help:
        print(describe_bench(name))
        return
    report = run_bench(name, context.args)
    if as_json:
        print(to_json(asdict(report)))
    else:
        _print_table(report.rows)
        _print_table([{"ratio": key, "value": value} for key, value in report.ratios.items()])
    if not report.exact:
        _complain(RunFailed(f"bench {name}: the results are not exact, so it gives no ratios"))
        raise typer.Exit(RunFailed.exit_code)


@app.command()
def demo() -> None:
    """Train a small model on this machine and compare its peaks with the unbounded ones."""
    from flatpeak.controller import demo as demonstration

    demonstration.main()


def main() -> None:
    """The console entry."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; the only place that maps errors to codes."""
    try:
        with terminated_as_interrupted():
            app(list(arguments), prog_name="flatpeak")
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:  # how typer ends, with 2 for misuse and 130 for Ctrl-C
        return leaving.code if isinstance(leaving.code, int) else 0
    except FlatpeakError as error:
        _complain(error)
        return _exit(error, error.exit_code, as_json="--json" in arguments)
    except Exception as error:
        # A bug, not bad input: its traceback is what is needed.
        traceback.print_exc()
        return _exit(error, RunFailed.exit_code, as_json="--json" in arguments)
    return 0


def _exit(error: Exception, code: int, *, as_json: bool) -> int:
    if as_json:
        report = {"kind": type(error).__name__, "message": str(error), "exit_code": code}
        with suppress(BrokenPipeError):  # nobody reads any more, which may be the error itself
            print(json.dumps({"error": report}), flush=True)
    return code


def _complain(error: FlatpeakError) -> None:
    print(f"flatpeak: {error}", file=sys.stderr)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(column))) for column in columns))
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple) and value:  # one figure a rank, say: JSON has them all
        return f"{_cell(min(value))} to {_cell(max(value))}"
    if not isinstance(value, float):
        return str(value).partition("\n")[0]
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
