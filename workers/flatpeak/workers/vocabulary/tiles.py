"""How large strips and moving pieces are, and which tensor moves: functions of agreed sizes."""

from collections.abc import Iterator
from dataclasses import dataclass

MIB = 1 << 20
# A strip this large keeps matrix units busy and is small beside any head weight worth sharding.
LARGEST_STRIP_BYTES = 128 * MIB
SMALLEST_STRIP_BYTES = 2 * MIB
WIDEST_STRIP = 8192
FP32_BYTES = 4


@dataclass(frozen=True)
class Tiles:
    tokens: int
    vocabulary: int


def choose_tiles(
    *, tokens: int, shard_rows: int, width: int, token_tile: int | None = None
) -> Tiles:
    """Tiles for at most `tokens` tokens and `shard_rows` vocabulary rows on any rank.

    The fp32 strip [tokens, vocabulary] takes up to an eighth of the bytes of an fp32 weight shard,
    within fixed bounds: larger strips mean fewer passes over the accumulators [tile, width].
    """
    shard_bytes = shard_rows * width * FP32_BYTES
    budget = min(max(shard_bytes // 8, SMALLEST_STRIP_BYTES), LARGEST_STRIP_BYTES)
    elements = budget // FP32_BYTES
    if token_tile is None:
        columns = min(shard_rows, WIDEST_STRIP)
        token_tile = min(elements // columns, tokens)
    else:
        columns = min(shard_rows, max(elements // token_tile, 1))
    return Tiles(tokens=max(token_tile, 1), vocabulary=max(columns, 1))


def weights_move(schedule: str, *, tokens: int, vocab_size: int, ranks: int) -> bool:
    """Whether weight shards tour the ring (else activations do): what is fewer bytes moves."""
    if schedule == "auto":
        return tokens * ranks > vocab_size
    return schedule == "weights"


def spans(rows: int, tile: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, tile):
        yield start, min(start + tile, rows)
