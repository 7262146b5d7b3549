"""FSDP2's collectives, known to `progress` as waits for peers."""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from flatpeak.workers.progress import waiting


class _AllGather(DefaultAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with waiting():
            return super().__call__(*args, **kwargs)


class _ReduceScatter(DefaultReduceScatter):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with waiting():
            return super().__call__(*args, **kwargs)


def watch_meetings(module: FSDPModule) -> None:
    """Has the collectives of `module` counted; what they do stays as it is."""
    module.set_custom_all_gather(_AllGather())
    module.set_custom_reduce_scatter(_ReduceScatter())
