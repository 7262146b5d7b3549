"""Registering host memory with CUDA, against a runtime written by hand."""

import resource

import pytest
import torch

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.errors import ClusterError
from flatpeak.workers.registration import Registration


class Cudart:
    """What is registered, by address; refuses a call that would exceed `limit` bytes in all."""

    def __init__(self, limit: int = 2**40) -> None:
        self.limit, self.held, self.calls = limit, {}, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        assert nbytes > 0
        assert flags == 0
        assert address not in self.held
        if sum(self.held.values()) + nbytes > self.limit:
            return 2
        self.held[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.held.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory", 713: "not registered"}[error]


@pytest.mark.parametrize("nbytes", [1, 99, 100, 101, 250])
def test_pieces_cover_the_memory_and_are_given_back(nbytes):
    memory, cudart = torch.empty(nbytes, dtype=torch.uint8), Cudart()
    held = Registration(memory, name="x", cudart=cudart, chunk_bytes=100)
    address = memory.data_ptr()
    for start, size in sorted(cudart.held.items()):
        assert start == address
        assert size <= 100
        address += size
    assert address == memory.data_ptr() + nbytes
    held.close()
    held.close()
    assert cudart.held == {}


def test_a_refused_piece_rolls_all_back_and_says_what_would_work():
    memory, cudart = torch.empty(2**20, dtype=torch.uint8), Cudart(limit=700_000)
    with pytest.raises(ClusterError) as caught:
        Registration(memory, name="/dev/shm/a", cudart=cudart, chunk_bytes=2**18)
    assert cudart.held == {}
    assert cudart.calls == 3
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "any number of" if limit == resource.RLIM_INFINITY else f"{limit:,}"
    for part in ("524,288 of the 1,048,576 bytes of /dev/shm/a", "out of memory", allowed, "1024"):
        assert part in str(caught.value)


def test_memory_that_was_not_registered_is_no_silent_end():
    cudart = Cudart()
    held = Registration(torch.empty(8, dtype=torch.uint8), name="x", cudart=cudart)
    cudart.held.clear()
    with pytest.raises(AssertionError, match="not registered"):
        held.close()


def test_an_arena_is_registered_whole_until_it_is_closed_or_dropped(tmp_path):
    buckets = [Bucket(0, 0, 0, (Range("p", 0, 1000),), "bfloat16", True, "adamw")]
    cudart = Cudart()
    for number in range(2):
        path = tmp_path / f"{number}.arena"
        arena = Arena.create(path, run="r", buckets=buckets, spare_frames=1, slab_bytes=77)
        arena.register(cudart=cudart)
        assert cudart.held == {arena._bytes.data_ptr(): arena.nbytes}
        if number == 0:
            arena.close()
        else:
            del arena
        assert cudart.held == {}
