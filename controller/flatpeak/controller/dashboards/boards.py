"""What the three dashboards show. Names of metrics are those of `metrics.names` alone."""

from flatpeak.controller.dashboards.panels import Json, Panel, Query, Variable, dashboard
from flatpeak.workers.metrics.names import METRICS

_WINDOW = "$__rate_interval"


def _of_run(name: str, *matchers: str) -> str:
    """A metric of the run that is chosen."""
    chosen = ",".join(['run="$run"', *matchers])
    return f"{METRICS[name].full_name}{{{chosen}}}"


def _of_ranks(name: str, *matchers: str) -> str:
    """A worker's metric, of the ranks that are chosen."""
    return _of_run(name, 'rank=~"$rank"', *matchers)


def _total(name: str) -> str:
    return _of_ranks(name, 'component="total"')


def _parts(name: str) -> str:
    return _of_ranks(name, 'component!="total"')


_RUN = Variable(
    name="run", label="Run", query=f"label_values({METRICS['target_steps'].full_name}, run)"
)
_RANK = Variable(
    name="rank",
    label="Rank",
    query=f'label_values({METRICS["worker_step_seconds"].full_name}{{run="$run"}}, rank)',
    several=True,
)


def dashboards() -> list[Json]:
    return [_overview(), _dispatch(), _optimizer()]


def _overview() -> Json:
    def stat(title: str, expr: str, help: str, **options: object) -> Panel:
        return Panel(
            title=title,
            kind="stat",
            width=4,
            height=4,
            queries=(Query(expr, title),),
            help=help,
            **options,  # type: ignore[arg-type]
        )

    budget = f"max({_of_ranks('device_budget_bytes')})"
    return dashboard(
        uid="flatpeak-run",
        title="Flatpeak: run",
        help="One run at a glance: where it stands, and every memory peak against its bound.",
        variables=[_RUN, _RANK],
        panels=[
            stat("Step", _of_run("step"), "Last step whose gradients are complete.", decimals=0),
            stat(
                "Done",
                f"{_of_run('step')} / {_of_run('target_steps')}",
                "Share of the job's steps.",
                unit="percentunit",
                decimals=1,
            ),
            stat("Loss", _of_run("loss"), "Of the last step.", decimals=4, least=None),
            stat(
                "Tokens a second",
                f"rate({_of_run('tokens_total')}[{_WINDOW}])",
                "Over all workers.",
                decimals=0,
            ),
            stat(
                "Highest peak of the budget",
                f"max({_total('peak_window_bytes')}) / {budget}",
                "Device memory of the fullest rank over memory.device_budget_bytes; no value "
                "where the job sets none.",
                unit="percentunit",
                decimals=1,
                thresholds=((0.9, "orange"), (0.95, "red")),
            ),
            stat(
                "Since the last snapshot",
                f"time() - {_of_run('snapshot_timestamp_seconds')}",
                "What a lost cluster would cost; before the first snapshot, since the start.",
                unit="s",
                decimals=0,
            ),
            Panel(
                title="Peaks by component, fullest rank",
                width=12,
                height=9,
                unit="bytes",
                queries=(
                    Query(
                        f"max by (component) ({_parts('peak_window_bytes')})",
                        "{{component}}",
                    ),
                    Query(
                        f"max by (component) ({_of_ranks('planned_peak_bytes')})",
                        "planned {{component}}",
                        is_bound=True,
                    ),
                ),
                help="Highest device memory of each component within the window, and the bound of "
                "those that have one; components peak at different times, so they do not add up "
                "to the total.",
            ),
            Panel(
                title="Whole peak by rank",
                width=12,
                height=9,
                unit="bytes",
                queries=(
                    Query(_total("peak_window_bytes"), "rank {{rank}}"),
                    Query(budget, "budget", is_bound=True),
                ),
                help="Highest device memory within the window, and memory.device_budget_bytes.",
            ),
            Panel(
                title="Loss",
                width=5,
                queries=(Query(_of_run("loss"), "loss"),),
                help="Of each step, over all ranks; a gap where it was not finite.",
                least=None,
            ),
            Panel(
                title="Gradient norm",
                width=5,
                queries=(Query(_of_run("gradient_norm"), "norm before clipping"),),
                help="Global norm of each step.",
                logarithmic=True,
                least=None,
            ),
            Panel(
                title="Learning rate",
                width=5,
                queries=(Query(_of_run("learning_rate"), "learning rate"),),
                help="Of each step.",
            ),
            Panel(
                title="Step time",
                width=5,
                unit="s",
                queries=(
                    Query(_of_run("step_seconds"), "step"),
                    Query(f"max({_of_ranks('worker_step_seconds')})", "slowest worker"),
                    Query(
                        f"max({_of_ranks('optimizer_exposed_seconds')})",
                        "waiting for the optimizer",
                    ),
                ),
                help="Wall time of a step, and what of it the forward pass stood still for "
                "weights that were not updated yet.",
            ),
            Panel(
                title="Events and skipped steps",
                width=4,
                queries=(
                    Query(f"{_of_run('events_total')}", "{{kind}}"),
                    Query(_of_run("skipped_steps_total"), "skipped steps"),
                ),
                help="Counted since the start of the controller.",
                decimals=0,
            ),
        ],
    )


def _dispatch() -> Json:
    return dashboard(
        uid="flatpeak-dispatch",
        title="Flatpeak: experts and dispatch",
        help="How skewed the routing is, what balancing makes of it, and what it takes.",
        variables=[_RUN, _RANK],
        panels=[
            Panel(
                title="Load imbalance",
                width=12,
                unit="none",
                decimals=2,
                queries=(
                    Query(f"max({_of_ranks('dispatch_imbalance_before_ratio')})", "as routed"),
                    Query(f"max({_of_ranks('dispatch_imbalance_after_ratio')})", "as planned"),
                ),
                help="Routes of the busiest rank over the mean, in the worst layer; 1 is level.",
                least=1,
            ),
            Panel(
                title="Dispatch above inputs and results",
                width=12,
                unit="bytes",
                queries=(
                    Query(_of_ranks("dispatch_planned_bytes"), "rank {{rank}}"),
                    Query(f"max({_of_ranks('dispatch_budget_bytes')})", "budget", is_bound=True),
                ),
                help="As planned for the worst layer, and memory.dispatch.budget_bytes.",
            ),
            Panel(
                title="Waiting for other ranks",
                width=6,
                unit="s",
                queries=(Query(_of_ranks("peer_wait_seconds"), "rank {{rank}}"),),
                help="Time for which the last step stood still for others: the rank with least is "
                "the one they wait for. Not measured on CUDA.",
            ),
            Panel(
                title="Chunks of a layer",
                width=6,
                queries=(Query(f"max({_of_ranks('dispatch_chunks')})", "chunks"),),
                help="More chunks take less memory and more time.",
                decimals=0,
            ),
            Panel(
                title="Foreign experts",
                width=6,
                queries=(Query(_of_ranks("dispatch_foreign_experts"), "rank {{rank}}"),),
                help="Experts of other ranks held at once; their weights move in each pass.",
                decimals=0,
            ),
            Panel(
                title="Rows received in a chunk",
                width=6,
                queries=(
                    Query(_of_ranks("dispatch_received_rows"), "rank {{rank}}"),
                    Query(f"max({_of_ranks('dispatch_receive_cap_rows')})", "cap", is_bound=True),
                ),
                help="Highest of the last step, and memory.dispatch.receive_rows where it is set.",
                decimals=0,
            ),
        ],
    )


def _optimizer() -> Json:
    def rate(name: str) -> str:
        return f"rate({_of_run(name)}[{_WINDOW}])"

    overlapped = f"sum({_of_ranks('overlapped_buckets')}) / sum({_of_ranks('buckets')})"
    return dashboard(
        uid="flatpeak-optimizer",
        title="Flatpeak: optimizer and host memory",
        help="Whether the update hides behind the next forward pass, and what host memory holds.",
        variables=[_RUN, _RANK],
        panels=[
            Panel(
                title="Waiting for the optimizer",
                unit="s",
                queries=(Query(_of_ranks("optimizer_exposed_seconds"), "rank {{rank}}"),),
                help="Time the last forward pass stood still for weights.",
            ),
            Panel(
                title="Buckets updated beside the forward pass",
                unit="percentunit",
                most=1,
                queries=(Query(overlapped, "of all buckets"),),
                help="Near 1 the update hides; at 0 the forward pass began after it.",
            ),
            Panel(
                title="Actors' time spent updating",
                unit="percentunit",
                most=1,
                queries=(Query(rate("update_seconds_total"), "actor {{rank}}"),),
                help="Near 1 more optimizer actors shorten a step; near 0 fewer would do.",
            ),
            Panel(
                title="Parameters updated a second",
                queries=(Query(rate("updated_parameters_total"), "actor {{rank}}"),),
                help="By each optimizer actor, waiting included.",
            ),
            Panel(
                title="Arenas",
                unit="bytes",
                queries=(Query(_of_run("arena_bytes"), "actor {{rank}}"),),
                help="Shared memory of each actor: masters, moments, gradients, boundaries.",
            ),
            Panel(
                title="Boundaries",
                unit="bytes",
                queries=(
                    Query(f"max({_of_ranks('boundaries_offloaded_bytes')})", "to the host"),
                    Query(f"max({_of_ranks('boundaries_kept_bytes')})", "kept on the device"),
                    Query(f"max({_of_ranks('boundaries_slab_bytes')})", "most in the slab at once"),
                ),
                help="Layer inputs of a step on the rank with most.",
            ),
        ],
    )
