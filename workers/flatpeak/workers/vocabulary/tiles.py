"""How large strips and moving pieces are, and which tensor moves: functions of agreed sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

MIB = 1 << 20
LARGEST_STRIP_BYTES = 64 * MIB
SMALLEST_STRIP_BYTES = 2 * MIB
FP32_BYTES = 4
ALIGNMENT = 64


@dataclass(frozen=True)
class Tiles:
    """A strip of logits is [tokens, vocabulary] in fp32; pieces that move have one of its sides."""

    tokens: int
    vocabulary: int


def choose_tiles(
    *, tokens: int, shard_rows: int, width: int, token_tile: int | None = None
) -> Tiles:
    """Tiles for at most `tokens` tokens and `shard_rows` vocabulary rows on any rank.

    A strip is square, since each pass over it reads and writes accumulators of both its sides and a
    square has the least of that traffic for its bytes. Its side is `token_tile`; by default an
    fp32 strip takes an eighth of the bytes of a weight shard, within fixed bounds. Where there are
    fewer tokens than that, the strip is up to four times as wide.
    """
    shard_bytes = shard_rows * width * FP32_BYTES
    strip_bytes = min(max(shard_bytes // 8, SMALLEST_STRIP_BYTES), LARGEST_STRIP_BYTES)
    side = token_tile or isqrt(strip_bytes // FP32_BYTES) // ALIGNMENT * ALIGNMENT
    tokens = max(min(side, tokens), 1)
    columns = side * min(side // tokens, 4)
    return Tiles(tokens=tokens, vocabulary=max(min(columns, shard_rows), 1))


def weights_move(schedule: str, *, tokens: int, vocab_size: int, ranks: int) -> bool:
    """Whether weight shards tour the ring (else activations do): what is fewer bytes moves."""
    if schedule == "auto":
        # Alone nothing travels, and activations need no fp32 gradient of all tokens at once.
        return ranks > 1 and tokens * ranks > vocab_size
    return schedule == "weights"


def spans(rows: int, tile: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, tile):
        yield start, min(start + tile, rows)
