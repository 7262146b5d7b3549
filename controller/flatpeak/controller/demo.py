"""The main job on one machine without a GPU, then its peaks beside those of a plain trainer.

Both are measured here and now: the run by its workers' meters, the plain trainer by the same meter
in this process, on as many tokens as one worker has.
"""

import time
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flatpeak.controller import launch
from flatpeak.controller.display import display_for
from flatpeak.controller.runs import Event, RunEvent, StepRecord, Summary
from flatpeak.controller.schedule import lr
from flatpeak.controller.spec import Spec, parse_spec
from flatpeak.workers.data import Samples
from flatpeak.workers.errors import RunFailed
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.plain import PlainTrainer
from flatpeak.workers.settings import samples_of

_PLAIN_STEPS = 2  # in the second one the optimizer state is there from the start
_LAST_STEPS = 10  # one step's documents differ too much from the next one's

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}


def demo_spec(run: str) -> Spec:
    return parse_spec(
        {
            "run": run,
            "model": {"config": MODEL},
            "train": {
                "steps": 60,
                "sequences_per_step": 2,
                "sequence_length": 4096,
                "lr": 6e-3,
                "schedule": {"warmup_steps": 5},
                "dtype": "float32",
            },
            "cluster": {"workers": 2, "optimizers": 1, "device": "cpu"},
            "parallel": {"sequence": 2, "expert": 2, "vocabulary": 2},
            "memory": {
                "dispatch": {"tokens_per_chunk": 1024},
                "vocabulary": {"token_tile": 512},
                "optimizer": {"bucket_parameters": 500_000},
            },
        }
    )


@dataclass(frozen=True)
class Row:
    component: str
    ours: int
    plain: int


def main() -> None:
    console = Console()
    spec = demo_spec(time.strftime("demo-%Y%m%d-%H%M%S"))
    console.print(_introduction(spec))
    events: list[Event] = []
    with display_for(steps=spec.train.steps, json=False) as display:

        def follow(event: Event) -> None:
            events.append(event)
            display(event)

        summary = launch.train(spec, on_event=follow)
    console.print(check_largest(spec, events))
    source = samples_of(spec)
    console.print("Measuring a plain trainer on the same samples ...")
    rows = compare(summary, measure_plain(spec, source))
    console.print(_table(rows))
    console.print(
        "Optimizer state and gradients are in host memory. Attention holds the head shards that "
        "the ranks of a sequence gather from each other, which a plain trainer does not have."
    )
    losses = [event.loss for event in events if isinstance(event, StepRecord)][-_LAST_STEPS:]
    console.print(
        f"Loss {sum(losses) / len(losses):.3f} over the last {len(losses)} steps; the "
        f"corpus's unigram entropy is {source.unigram_entropy():.3f}.\n"
        f"Steps, events, peaks and logs: {summary.folder}"
    )


def check_largest(spec: Spec, events: list[Event]) -> str:
    """Says how large the largest tensors were; refuses a run whose meter saw an unbounded one."""
    shapes = next(
        event.detail["shapes"]
        for event in events
        if isinstance(event, RunEvent) and event.kind == "largest_tensors"
    )
    tokens = spec.train.sequences_per_step * spec.train.sequence_length // spec.cluster.workers
    routes = tokens * MODEL["num_experts_per_tok"]
    unbounded = {
        "vocabulary": ("tokens x vocabulary", tokens * MODEL["vocab_size"]),
        "dispatch": ("routes x expert width", routes * MODEL["moe_intermediate_size"]),
    }
    lines = []
    for component, (what, limit) in unbounded.items():
        found = prod(shapes[component])
        if found >= limit:
            raise RunFailed(f"{component} made a tensor {shapes[component]}: {what} is {limit}")
        lines.append(
            f"Largest tensor of {component}: {found:,} elements; {what} would be {limit:,}."
        )
    return "\n".join(lines)


def measure_plain(spec: Spec, source: Samples) -> dict[str, int]:
    """Peak bytes by component of a plain trainer with one worker's tokens."""
    sequences = max(1, spec.train.sequences_per_step // spec.cluster.workers)
    torch.set_num_threads(spec.cluster.workers * spec.cluster.cpus_per_worker)
    plain = PlainTrainer(spec, source, sequences=sequences)
    meter = PeakMeter()
    for parameter in plain.model.parameters():
        meter.track(parameter, "weights")
    with meter:
        for step in range(1, _PLAIN_STEPS + 1):
            plain.step(step, lr(step, train=spec.train))
    return meter.lifetime_peaks()


def compare(summary: Summary, plain: dict[str, int]) -> list[Row]:
    ours = summary.peak_bytes
    names = sorted((ours.keys() | plain.keys()) - {TOTAL}, key=lambda n: -plain.get(n, 0))
    return [Row(name, ours.get(name, 0), plain.get(name, 0)) for name in [*names, TOTAL]]


def _introduction(spec: Spec) -> str:
    train, cluster, parallel = spec.train, spec.cluster, spec.parallel
    return (
        f"Training a {MODEL['model_type']} with {MODEL['num_experts']} experts for {train.steps} "
        f"steps of {train.sequences_per_step} x {train.sequence_length} tokens on "
        f"{cluster.workers} workers and {cluster.optimizers} optimizer actor "
        f"(D = {parallel.sequence}, E_p = {parallel.expert}, P = {parallel.vocabulary})."
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="Peak device memory of one worker, measured in this run", box=None)
    table.add_column("component")
    for column in ("Flatpeak MiB", "plain MiB", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio = f"{row.ours / row.plain:.3f}" if row.plain else "-"
        table.add_row(row.component, f"{row.ours / 2**20:.2f}", f"{row.plain / 2**20:.2f}", ratio)
    return table
