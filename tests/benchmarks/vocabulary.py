"""The vocabulary loss beside other ways to it: bytes, seconds, error.

One rank: dense logits, and torch's chunked linear cross-entropy. Several: vocabulary-parallel, with
gathered tokens and all-reduced statistics. All get the same tokens and head weight in one run, and
make the mean loss over all tokens, forward and backward. A result is compared with dense fp64
logits. The increment is the tracked peak over what is resident anyway: inputs, loss and gradients.

The growths are what twice the tokens, or twice the vocabulary, put on our increment at the same
tiles and schedule. At 1 all that grows is resident: hidden states, weight shards, their gradients.
"""

import math
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flatpeak.controller.bench import check_ranges
from flatpeak.workers.errors import InputError
from flatpeak.workers.memory import TOTAL, PeakMeter
from flatpeak.workers.partition import part
from flatpeak.workers.vocabulary.agreement import SCHEDULES
from flatpeak.workers.vocabulary.tiles import choose_tiles, weights_move
from ranks import run_ranks
from vocabulary_methods import Loss, dense, ring, torch_chunked, vocabulary_parallel

DEFAULTS = {
    "tokens": 2048,  # on each rank
    "hidden": 448,
    "vocab": 12_500,
    "ranks": 8,
    "schedule": "auto",
    "token_tile": 0,  # 0 chooses by bytes
    "repeats": 3,  # 0 measures bytes alone
}
TOLERANCE = 1e-6
TIMEOUT_S = 1800.0  # large layers on few cores
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Result:
    loss: float
    d_hidden: Tensor
    d_weight: Tensor
    resident_bytes: int
    peak_bytes: int
    flops: int
    seconds: list[float]

    @property
    def increment_bytes(self) -> int:
        return self.peak_bytes - self.resident_bytes


def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]:
    check(config)
    ranks, tokens = config["ranks"], config["tokens"]
    batches, weight = [make_batch(config, rank) for rank in range(ranks)], make_weight(config)
    alone = measure(one_rank_methods(config), *batches[0], weight, config["repeats"])
    together = on_all_ranks(config) if ranks > 1 else {"ring": alone["ring"]}
    rows = rows_of(alone, 1, tokens, reference(batches[:1], weight))
    if ranks > 1:
        rows += rows_of(together, ranks, tokens, reference(batches, weight))
    exact = all(row["error"] <= TOLERANCE for row in rows if row["method"] == "ring")
    return exact, rows, ratios(alone, together) | growths(config)


def check(config: dict) -> None:
    """Raise InputError for what cannot be measured."""
    counts = dict.fromkeys(("tokens", "hidden", "vocab", "ranks"), (1, math.inf))
    check_ranges(config, counts | dict.fromkeys(("token_tile", "repeats"), (0, math.inf)))
    if config["vocab"] < config["ranks"]:
        raise InputError(
            f"--vocab {config['vocab']}: should be {config['ranks']} or more, a row a rank"
        )
    if config["schedule"] not in SCHEDULES:
        raise InputError(f"--schedule {config['schedule']}: there are {', '.join(SCHEDULES)}")


def growths(config: dict) -> dict[str, float | None]:
    fixed = config | same_for_twice(config) | {"repeats": 0}

    def increment(**changes: int) -> int:
        return on_all_ranks(fixed | changes, methods=("ring",))["ring"].increment_bytes

    once = increment()
    return {
        "increment_growth_on_doubling_n": increment(tokens=2 * config["tokens"]) / once,
        "increment_growth_on_doubling_v": increment(vocab=2 * config["vocab"]) / once,
    }


def same_for_twice(config: dict) -> dict[str, int | str]:
    """The schedule that `config` comes to, and a tile that twice the tokens or rows leave alone."""
    tiles = choose_tiles(
        tokens=config["tokens"],
        shard_rows=config["vocab"] // config["ranks"],
        width=config["hidden"],
        token_tile=config["token_tile"] or None,
    )
    moving = weights_move(
        config["schedule"],
        tokens=config["tokens"],
        vocab_size=config["vocab"],
        ranks=config["ranks"],
    )
    return {
        "token_tile": min(tiles.tokens, tiles.vocabulary),
        "schedule": "weights" if moving else "activations",
    }


def ratios(alone: dict[str, Result], together: dict[str, Result]) -> dict[str, float | None]:
    own, baseline = together["ring"], alone["dense"]
    chunked, parallel = alone.get("torch chunked"), together.get("vocabulary parallel")
    found = {
        "increment_vs_dense": own.increment_bytes / baseline.increment_bytes,
        "increment_vs_torch_chunked_p1": chunked
        and alone["ring"].increment_bytes / chunked.increment_bytes,
        "time_vs_torch_chunked_p1": chunked and quotient(alone["ring"].seconds, chunked.seconds),
        "flops_vs_dense": own.flops / baseline.flops,
    }
    if parallel is not None:
        found["increment_vs_vocabulary_parallel"] = own.increment_bytes / parallel.increment_bytes
        found["time_vs_vocabulary_parallel"] = quotient(own.seconds, parallel.seconds)
    return found


def quotient(ours: list[float], theirs: list[float]) -> float | None:
    """Of medians; None where no time was taken."""
    return statistics.median(ours) / statistics.median(theirs) if ours else None


def make_batch(config: dict, rank: int) -> Batch:
    make = torch.Generator().manual_seed(rank)
    return (
        torch.randn(config["tokens"], config["hidden"], generator=make),
        torch.randint(config["vocab"], (config["tokens"],), generator=make),
    )


def make_weight(config: dict) -> Tensor:
    make, hidden = torch.Generator().manual_seed(-1), config["hidden"]
    return torch.randn(config["vocab"], hidden, generator=make) * hidden**-0.5


def our_method(config: dict, ranks: int) -> Loss:
    return ring(
        config["vocab"],
        ranks=ranks,
        schedule=config["schedule"],
        token_tile=config["token_tile"] or None,
    )


def one_rank_methods(config: dict) -> dict[str, Loss]:
    methods = {"ring": our_method(config, 1), "dense": dense}
    chunked = torch_chunked()
    return methods if chunked is None else methods | {"torch chunked": chunked}


def on_all_ranks(
    config: dict, methods: tuple[str, ...] = ("ring", "vocabulary parallel")
) -> dict[str, Result]:
    """By method, one result for all ranks: their parts together, and the most that one took."""
    ranks = config["ranks"]
    if ranks == 1:
        results = [one_of_many(0, config, methods)]
    else:
        results = run_ranks(ranks, one_of_many, config, methods, timeout_s=TIMEOUT_S)
    return {name: joined([result[name] for result in results]) for name in methods}


def one_of_many(rank: int, config: dict, names: tuple[str, ...]) -> dict[str, Result]:
    methods = {
        "ring": our_method(config, config["ranks"]),
        "vocabulary parallel": vocabulary_parallel,
    }
    start, stop = part(config["vocab"], config["ranks"], rank)
    shard = make_weight(config)[start:stop].clone()
    wanted = {name: methods[name] for name in names}
    return measure(wanted, *make_batch(config, rank), shard, config["repeats"])


def joined(results: list[Result]) -> Result:
    fullest = max(results, key=lambda result: result.increment_bytes)
    return Result(
        loss=sum(result.loss for result in results),
        d_hidden=torch.cat([result.d_hidden for result in results]),
        d_weight=torch.cat([result.d_weight for result in results]),
        resident_bytes=fullest.resident_bytes,
        peak_bytes=fullest.peak_bytes,
        flops=max(result.flops for result in results),
        seconds=[max(times) for times in zip(*(r.seconds for r in results), strict=True)],
    )


def measure(
    methods: dict[str, Loss], x: Tensor, t: Tensor, w: Tensor, repeats: int
) -> dict[str, Result]:
    """Each method once under the meters, which warms it, then all of them in turn for the clock."""
    x, w = x.requires_grad_(), w.requires_grad_()
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    metered = {name: meter(loss, x, t, w, seconds[name]) for name, loss in methods.items()}
    for _ in range(repeats):
        for name, loss in methods.items():
            x.grad = w.grad = None
            begin = time.perf_counter()
            loss(x, t, w).backward()
            seconds[name].append(time.perf_counter() - begin)
    return metered


def meter(loss: Loss, x: Tensor, t: Tensor, w: Tensor, seconds: list[float]) -> Result:
    x.grad = w.grad = None
    with PeakMeter() as memory, flop_counter() as counter:
        value = loss(x, t, w)
        value.backward()
        peak = memory.peaks()[TOTAL]
    assert x.grad is not None
    assert w.grad is not None
    inputs = x.nbytes + t.nbytes + w.nbytes
    return Result(
        loss=value.item(),
        d_hidden=x.grad,
        d_weight=w.grad,
        resident_bytes=inputs + value.nbytes + x.grad.nbytes + w.grad.nbytes,
        peak_bytes=inputs + peak,
        flops=counter.get_total_flops(),
        seconds=seconds,
    )


def flop_counter() -> FlopCounterMode:
    from torch import ops  # not at the top: the ranks get this file's names by value

    def in_place(total, a, b, **_) -> int:
        return 2 * a[0] * a[1] * b[1]

    # torch's counter leaves out `total [m, n] += a [m, k] b [k, n]`.
    return FlopCounterMode(display=False, custom_mapping={ops.aten.addmm_: in_place})


def reference(batches: list[Batch], weight: Tensor) -> tuple[float, Tensor, Tensor]:
    """Dense mean loss, d hidden and d weight in fp64, one rank's tokens at a time."""
    weight = weight.detach().double().requires_grad_()
    total, value, d_hidden = sum(len(t) for _, t in batches), 0.0, []
    for x, t in batches:
        x = x.detach().double().requires_grad_()
        loss = F.cross_entropy(x @ weight.t(), t, reduction="sum") / total
        loss.backward()
        value += loss.item()
        d_hidden.append(x.grad)
    assert weight.grad is not None
    return value, torch.cat(d_hidden), weight.grad


def error(result: Result, expected: tuple[float, Tensor, Tensor]) -> float:
    """The largest of the relative errors of loss, d hidden and d weight; NaN if any is."""
    loss, d_hidden, d_weight = expected
    found = [
        abs(result.loss - loss) / abs(loss),
        ((result.d_hidden - d_hidden).norm() / d_hidden.norm()).item(),
        ((result.d_weight - d_weight).norm() / d_weight.norm()).item(),
    ]
    return math.nan if any(map(math.isnan, found)) else max(found)


def rows_of(
    results: dict[str, Result], ranks: int, tokens: int, expected: tuple[float, Tensor, Tensor]
) -> list[dict]:
    return [
        {
            "method": name,
            "ranks": ranks,
            "tokens": tokens,
            "resident_bytes": result.resident_bytes,
            "peak_bytes": result.peak_bytes,
            "increment_bytes": result.increment_bytes,
            "seconds": statistics.median(result.seconds) if result.seconds else None,
            "seconds_min": min(result.seconds, default=None),
            "seconds_max": max(result.seconds, default=None),
            "flops": result.flops or None,  # one fused operator hides its products
            "error": error(result, expected),
        }
        for name, result in results.items()
    ]
