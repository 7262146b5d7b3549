"""One rank's strips of the vocabulary loss on one device: bytes, seconds, share of matmul rate.

    python tests/gpu/vocabulary.py [--tokens N] [--ranks P] ... [--json]

A rank of P meets its tokens with V / P rows of the head weight at a time, so one process without
collectives runs just that; P = 1 is the whole loss of a single device. The fused strip and the
plain one are set beside dense logits, torch's chunked loss and Liger's, where they are there. Every
method is held against fp64 first. Without a GPU it runs a small case on the CPU, unfused.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from flatpeak.controller.bench import BenchReport, parse_options, versions
from flatpeak.controller.runs import to_json
from flatpeak.kernels import vocabulary_strip
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy
from flatpeak.workers.vocabulary.tiles import spans

CHECKOUT = Path(__file__).resolve().parents[2]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of the loss, and of the gradients: bf16 residuals are off by 2^-9 each.
TOLERANCES = {"bfloat16": (1e-5, 1e-2), "float32": (1e-6, 1e-5)}
OURS = ("fused", "reference")
# Forward, and backward by hidden states and weight; what is computed again is the method's affair.
PRODUCTS = 3
# How many rows of each gradient are compared: a whole fp64 gradient takes gigabytes.
SAMPLE = 128

ON_GPU = {
    "tokens": (16_384, 32_768),
    "ranks": (8, 1),
    "hidden": 7168,
    "vocab": 200_000,
    "dtype": "bfloat16",
    "repeats": 3,
}
ON_CPU = {
    "tokens": (64, 128),
    "ranks": (8, 1),
    "hidden": 64,
    "vocab": 1000,
    "dtype": "float32",
    "repeats": 2,
}


@dataclass(frozen=True)
class Batch:
    hidden: Tensor
    targets: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Expected:
    """The mean loss in fp64, and the first rows of its gradients."""

    loss: float
    d_hidden: Tensor
    d_weight: Tensor


Grads = tuple[Tensor, Tensor]
Method = Callable[[Batch], tuple[Tensor, Callable[[], Grads]]]


def methods(device: str) -> dict[str, Method]:
    """Each gives the mean loss, and a call that runs backward and returns both gradients."""
    found: dict[str, Method] = {"reference": ours, "dense": dense}
    if vocabulary_strip._kernels(torch.empty(0, device=device)) is not vocabulary_strip.reference:
        found = {"fused": ours} | found
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["torch chunked"] = torch_chunked
    if device == "cuda" and find_spec("liger_kernel") is not None:
        found["liger"] = liger
    return found


def ours(batch: Batch) -> tuple[Tensor, Callable[[], Grads]]:
    received: list[Tensor] = []
    hidden = batch.hidden.detach().requires_grad_()
    loss = ring_cross_entropy(
        hidden,
        batch.targets,
        batch.weight,
        group=None,
        vocab_size=len(batch.weight),
        grad_sink=received.append,
    ).mean()

    def backward() -> Grads:
        loss.backward()
        assert hidden.grad is not None
        return hidden.grad, received.pop()

    return loss, backward


def by_autograd(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Method:
    def method(batch: Batch) -> tuple[Tensor, Callable[[], Grads]]:
        leaves = (batch.hidden.detach().requires_grad_(), batch.weight.detach().requires_grad_())
        value = loss(leaves[0], batch.targets, leaves[1])
        return value, lambda: torch.autograd.grad(value, leaves)

    return method


dense = by_autograd(lambda x, t, w: F.cross_entropy((x @ w.t()).float(), t))


@by_autograd
def torch_chunked(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, w, t, options=torch.nn.LinearCrossEntropyOptions())


@by_autograd
def liger(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(w, x, t)


@contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Let our strips be the plain ones for the method `reference`."""
    if name != "reference":
        yield
        return
    plain = vocabulary_strip.reference
    with mock.patch.object(vocabulary_strip, "_kernels", return_value=plain):
        yield


def run(config: dict, device: str) -> tuple[bool, list[dict], dict[str, float | None]]:
    rate = matmul_rate(config, device)
    rows = []
    for tokens, ranks in product(config["tokens"], config["ranks"]):
        batch = make_batch(config, tokens, ranks, device)
        flops = PRODUCTS * 2 * tokens * batch.weight.numel()
        for row in measure(batch, config, device):
            share = row["seconds"] and flops / row["seconds"] / rate
            rows.append({"tokens": tokens, "ranks": ranks, **row, "matmul_share": share})
            print(rows[-1], file=sys.stderr, flush=True)
        del batch
    exact = all(row["exact"] for row in rows if row["method"] in OURS)
    return exact, rows, {"matmul_flops_per_s": rate} | ratios(rows)


def make_batch(config: dict, tokens: int, ranks: int, device: str) -> Batch:
    make = torch.Generator(device).manual_seed(0)
    dtype, hidden = DTYPES[config["dtype"]], config["hidden"]
    start, stop = part(config["vocab"], ranks, 0)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, hidden, generator=make, device=device, dtype=dtype)

    targets = torch.randint(stop - start, (tokens,), generator=make, device=device)
    return Batch(normal(tokens), targets, normal(stop - start).mul_(hidden**-0.5))


def measure(batch: Batch, config: dict, device: str) -> list[dict]:
    expected, found = fp64(batch), methods(device)
    rows = {name: metered(name, found[name], batch, expected, config) for name in found}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(config["repeats"]):
        for name, method in found.items():
            if rows[name]["exact"] is not None:  # else it does not fit
                with kernels_of(name):
                    seconds[name].append(timed(method, batch))
    for name, taken in seconds.items():
        rows[name]["seconds"] = statistics.median(taken) if taken else None
        rows[name]["spread_s"] = max(taken) - min(taken) if taken else None
    return list(rows.values())


def metered(name: str, method: Method, batch: Batch, expected: Expected, config: dict) -> dict:
    """Peak bytes above the inputs, and the errors; all None where memory does not suffice."""
    row: dict[str, Any] = {"method": name}
    try:
        with kernels_of(name):
            if batch.hidden.is_cuda:
                method(batch)[1]()  # what libraries allocate for good is no part of a peak
            with PeakMeter(device=batch.hidden.device) as memory:
                before = memory.live().get(TOTAL, 0)
                memory.reset_peaks()
                loss, backward = method(batch)
                grads = backward()
                peak = memory.peaks()[TOTAL] - before
    except torch.OutOfMemoryError:
        return row | dict.fromkeys(
            ("peak_bytes", "increment_bytes", "loss_error", "error", "exact")
        )
    loss_error = abs(loss.item() - expected.loss) / expected.loss
    error = max(
        float((actual[: len(rows)].double() - rows).norm() / rows.norm())
        for actual, rows in zip(grads, (expected.d_hidden, expected.d_weight), strict=True)
    )
    loss_tolerance, tolerance = TOLERANCES[config["dtype"]]
    return row | {
        "peak_bytes": peak,
        "increment_bytes": peak - sum(grad.nbytes for grad in grads),
        "loss_error": loss_error,
        "error": error,
        "exact": loss_error <= loss_tolerance and error <= tolerance,
    }


def fp64(batch: Batch) -> Expected:
    x, t, w = batch.hidden, batch.targets, batch.weight
    sample = w[:SAMPLE].double()
    lse, y, d_weight = [], [], torch.zeros_like(sample)
    for a, b in spans(len(x), 2048):
        rows = x[a:b].double()
        parts = [(rows @ w[c:d].double().t()).logsumexp(1) for c, d in spans(len(w), 16_384)]
        lse.append(torch.stack(parts).logsumexp(0))
        y.append((rows * w[t[a:b]].double()).sum(1))
        p = (rows @ sample.t() - lse[-1].unsqueeze(1)).exp()
        d_weight += (p - onehot(t[a:b], 0, len(sample))).t() @ rows
    rows, top = x[:SAMPLE].double(), lse[0][:SAMPLE].unsqueeze(1)
    d_hidden = torch.zeros_like(rows)
    for c, d in spans(len(w), 16_384):
        part_of_w = w[c:d].double()
        p = (rows @ part_of_w.t() - top).exp()
        d_hidden += (p - onehot(t[:SAMPLE], c, d)) @ part_of_w
    loss = (torch.cat(lse) - torch.cat(y)).mean().item()
    return Expected(loss, d_hidden / len(x), d_weight / len(x))


def onehot(targets: Tensor, start: int, stop: int) -> Tensor:
    return (targets.unsqueeze(1) == torch.arange(start, stop, device=targets.device)).double()


def matmul_rate(config: dict, device: str) -> float:
    """Operations a second of torch's product of two such matrices, in the same dtype and width."""
    hidden = config["hidden"]
    rows = 8192 if device == "cuda" else 512
    a, b = (
        torch.randn(rows, hidden, device=device, dtype=DTYPES[config["dtype"]]) for _ in range(2)
    )
    torch.mm(a, b.t())
    taken = []
    for _ in range(10):
        with clock(device) as seconds:
            torch.mm(a, b.t())
        taken.append(seconds())
    return 2 * rows * rows * hidden / statistics.median(taken)


def timed(method: Method, batch: Batch) -> float:
    with clock(batch.hidden.device.type) as seconds:
        method(batch)[1]()
    return seconds()


@contextmanager
def clock(device: str) -> Iterator[Callable[[], float]]:
    """Seconds of the block: between two events of the device, or by the clock on the CPU."""
    if device == "cpu":
        times = [perf_counter()]
        yield lambda: times[1] - times[0]
        times.append(perf_counter())
        return
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    yield lambda: begin.elapsed_time(end) / 1000
    end.record()
    end.synchronize()


def ratios(rows: list[dict]) -> dict[str, float | None]:
    """Our best method against each of the others: the least favourable of all cases."""
    cells = {(row["method"], row["tokens"], row["ranks"]): row for row in rows}
    names = list(dict.fromkeys(row["method"] for row in rows))
    mine = names[0]
    shares = [row["matmul_share"] for row in rows if row["method"] == mine]
    found: dict[str, float | None] = {"matmul_share_min": min(filter(None, shares), default=None)}
    for other in names[1:]:
        for figure, column in (("increment", "increment_bytes"), ("time", "seconds")):
            pairs = [
                (row[column], cells[(other, tokens, ranks)][column])
                for (method, tokens, ranks), row in cells.items()
                if method == mine
            ]
            known = [a / b for a, b in pairs if a is not None and b]
            found[f"{figure}_vs_{other.replace(' ', '_')}_max"] = max(known, default=None)
    return found


def main(words: Sequence[str]) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dict(ON_GPU if device == "cuda" else ON_CPU)
    config |= parse_options([word for word in words if word != "--json"], config)
    exact, rows, found = run(config, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report = BenchReport(
        bench="gpu/vocabulary",
        exact=exact,
        ratios=found if exact else {},
        rows=rows,
        config=config,
        versions=versions(CHECKOUT) | {"device": name},
    )
    if "--json" in words:
        print(to_json(asdict(report)))
    else:
        for key, value in report.ratios.items():
            print(key, "out of memory" if value is None else f"{value:.3g}")
    return 0 if exact else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
