"""The order of samples: which global indices a step uses, and which window an index names.

Everything here is a pure function of its arguments. There is no cursor to save, so a resume, a
resize or a recovery that knows its step number repeats no sample and loses none.
"""

import struct
from hashlib import blake2b

from flatpeak.workers.partition import part

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


def sample_ids(step: int, sequences_per_step: int) -> range:
    """Global sample indices of `step` (counted from 0), over all ranks."""
    assert step >= 0, f"step {step}"
    assert sequences_per_step > 0, f"{sequences_per_step} sequences a step"
    return range(step * sequences_per_step, (step + 1) * sequences_per_step)


def share_of(ids: range, *, count: int, index: int) -> range:
    """Contiguous share `index` of `count` of a step's ids; shares differ by at most one sample.

    A share belongs to one sequence group, not to one rank: ranks that split a sequence read the
    same samples. The union over the shares is `ids` for every `count`.
    """
    start, stop = part(len(ids), count, index)
    return ids[start:stop]


def permute(position: int, size: int, *, seed: int, epoch: int) -> int:
    """Image of `position` under the permutation of `range(size)` that (seed, epoch) selects.

    A keyed Feistel network permutes the smallest domain of an even number of bits that covers
    `size`; values that land outside are sent through it again until they land inside (cycle
    walking), which keeps it a bijection. It needs no table, whatever the size of the corpus.
    The domain is less than four times `size` (above one), so few passes are needed.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
    """
    assert 0 <= position < size, f"position {position} of {size}"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    # A digest, not Python's hash(): the order may not change between processes or versions.
    digest = blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = struct.unpack(f"<{_ROUNDS}Q", digest)
    value = _feistel(position, half_bits, keys)
    while value >= size:
        value = _feistel(value, half_bits, keys)
    return value


def _feistel(value: int, half_bits: int, keys: tuple[int, ...]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in keys:
        left, right = right, left ^ (_mix((right + key) & _MASK64) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31
