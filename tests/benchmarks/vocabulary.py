"""The vocabulary loss beside dense logits and torch's chunked one: bytes, seconds, error.

Every method gets the same tokens and head weight in one run, the mean loss over all tokens, forward
and backward. Increments are tracked peak bytes over the resident tensors: inputs and gradients.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary import ring_cross_entropy
from ranks import run_ranks

Config = dict[str, int | float | str | bool]

DEFAULTS: Config = {
    "tokens": 1024,  # on each rank
    "hidden": 128,
    "vocab": 8192,
    "ranks": 4,
    "schedule": "auto",
    "token_tile": 0,  # 0 chooses by bytes
    "repeats": 3,
}
TOLERANCE = 1e-6


def flop_counter() -> FlopCounterMode:
    from torch import ops  # not at the top: the ranks get this file's names by value

    def in_place(total, a, b, **_) -> int:
        return 2 * a[0] * a[1] * b[1]

    # torch's counter leaves out `total [m, n] += a [m, k] b [k, n]`.
    return FlopCounterMode(display=False, custom_mapping={ops.aten.addmm_: in_place})


@dataclass(frozen=True)
class Result:
    loss: float
    d_hidden: Tensor
    d_weight: Tensor
    seconds: float
    increment_bytes: int
    flops: int


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    ranks = int(config["ranks"])
    batches = [make_batch(config, rank) for rank in range(ranks)]
    own, weight = batches[0], make_weight(config)
    tokens = int(config["tokens"])
    one_rank = measure_all(single_rank_methods(config), *own, weight, int(config["repeats"]))
    expected = reference([own], weight, tokens)
    rows = [row(name, 1, result, error(result, expected)) for name, result in one_rank.items()]
    if ranks > 1:
        ring = joined(run_ranks(ranks, ring_rank, config))
        rows.append(
            row("ring", ranks, ring, error(ring, reference(batches, weight, ranks * tokens)))
        )
    else:
        ring = one_rank["ring"]
    chunked, dense = one_rank.get("torch chunked"), one_rank["dense"]
    ratios = {
        "time_vs_torch_chunked_p1": chunked and one_rank["ring"].seconds / chunked.seconds,
        "increment_vs_torch_chunked_p1": chunked
        and one_rank["ring"].increment_bytes / chunked.increment_bytes,
        "increment_vs_dense": ring.increment_bytes / dense.increment_bytes,
        "flops_vs_dense": ring.flops / dense.flops,
    }
    exact = all(entry["error"] <= TOLERANCE for entry in rows if entry["method"] == "ring")
    return exact, rows, ratios


def make_batch(config: dict, rank: int) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(rank)
    tokens, hidden, vocab = int(config["tokens"]), int(config["hidden"]), int(config["vocab"])
    return (
        torch.randn(tokens, hidden, generator=make),
        torch.randint(vocab, (tokens,), generator=make),
    )


def make_weight(config: dict) -> Tensor:
    hidden, vocab = int(config["hidden"]), int(config["vocab"])
    return torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(-1)) * hidden**-0.5


def single_rank_methods(config: dict) -> dict[str, Loss]:
    tokens = int(config["tokens"])
    methods: dict[str, Loss] = {
        "ring": lambda x, t, w: ring_loss(config, x, t, w, None) / tokens,
        "dense": lambda x, t, w: F.cross_entropy(x @ w.t(), t),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        options = torch.nn.LinearCrossEntropyOptions()
        methods["torch chunked"] = lambda x, t, w: F.linear_cross_entropy(x, w, t, options=options)
    return methods


def ring_loss(
    config: dict, x: Tensor, t: Tensor, w: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    return ring_cross_entropy(
        x,
        t,
        w,
        group=group,
        vocab_size=int(config["vocab"]),
        token_tile=int(config["token_tile"]) or None,
        schedule=str(config["schedule"]),
    ).sum()


def ring_rank(rank: int, config: dict) -> Result:
    ranks = int(config["ranks"])
    start, stop = part(int(config["vocab"]), ranks, rank)
    total = ranks * int(config["tokens"])
    group = dist.group.WORLD
    methods: dict[str, Loss] = {"ring": lambda x, t, w: ring_loss(config, x, t, w, group) / total}
    shard = make_weight(config)[start:stop].clone()
    return measure_all(methods, *make_batch(config, rank), shard, int(config["repeats"]))["ring"]


def measure_all(
    methods: dict[str, Loss], x: Tensor, t: Tensor, w: Tensor, repeats: int
) -> dict[str, Result]:
    """Each method once under the meters, which warms it, then all of them in turn for the clock."""
    x, w = x.requires_grad_(), w.requires_grad_()
    metered = {name: meter(loss, x, t, w) for name, loss in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, loss in methods.items():
            x.grad = w.grad = None
            begin = time.perf_counter()
            loss(x, t, w).backward()
            seconds[name].append(time.perf_counter() - begin)
    return {
        name: Result(*values, seconds=statistics.median(seconds[name]), **counts)
        for name, (values, counts) in metered.items()
    }


def meter(
    loss: Loss, x: Tensor, t: Tensor, w: Tensor
) -> tuple[tuple[float, Tensor, Tensor], dict[str, int]]:
    x.grad = w.grad = None
    with PeakMeter() as memory, flop_counter() as counter:
        value = loss(x, t, w)
        value.backward()
    assert x.grad is not None
    assert w.grad is not None
    resident = x.grad.nbytes + w.grad.nbytes
    return (value.item(), x.grad, w.grad), {
        "increment_bytes": memory.peaks()[TOTAL] - resident,
        "flops": counter.get_total_flops(),
    }


def joined(results: list[Result]) -> Result:
    """One result for a whole ring: its parts together, and the rank that took the most."""
    return Result(
        loss=sum(result.loss for result in results),
        d_hidden=torch.cat([result.d_hidden for result in results]),
        d_weight=torch.cat([result.d_weight for result in results]),
        seconds=max(result.seconds for result in results),
        increment_bytes=max(result.increment_bytes for result in results),
        flops=max(result.flops for result in results),
    )


def reference(
    batches: list[tuple[Tensor, Tensor]], weight: Tensor, total: int
) -> tuple[float, Tensor, Tensor]:
    """Dense loss, d hidden and d weight in fp64, one rank's tokens at a time."""
    weight = weight.detach().double().requires_grad_()
    value, d_hidden = 0.0, []
    for x, t in batches:
        x = x.detach().double().requires_grad_()
        loss = F.cross_entropy(x @ weight.t(), t, reduction="sum") / total
        loss.backward()
        value += loss.item()
        d_hidden.append(x.grad)
    assert weight.grad is not None
    return value, torch.cat(d_hidden), weight.grad


def error(result: Result, expected: tuple[float, Tensor, Tensor]) -> float:
    """The largest of the relative errors of loss, d hidden and d weight."""
    loss, d_hidden, d_weight = expected
    return max(
        abs(result.loss - loss) / abs(loss),
        ((result.d_hidden - d_hidden).norm() / d_hidden.norm()).item(),
        ((result.d_weight - d_weight).norm() / d_weight.norm()).item(),
    )


def row(name: str, ranks: int, result: Result, error: float) -> dict:
    return {
        "method": name,
        "ranks": ranks,
        "seconds": result.seconds,
        "increment_bytes": result.increment_bytes,
        "flops": result.flops or None,  # one fused operator hides its products
        "error": error,
    }
