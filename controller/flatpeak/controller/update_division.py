"""Whether a bucket's actor or its worker updates it, said once for the whole run."""

from collections.abc import Generator, Sequence

from flatpeak.controller.placement import Placed
from flatpeak.controller.runs import Event, event
from flatpeak.controller.spec import Spec
from flatpeak.controller.worker_group import Ask
from flatpeak.workers.buckets import Bucket
from flatpeak.workers.update_split import DeviceRates, assign_updates, split_updates


def divide_updates(
    spec: Spec,
    buckets: tuple[Bucket, ...],
    device: str,
    *,
    workers: Sequence[Placed],
    optimizers: Sequence[Placed],
    ask: Ask,
) -> Generator[Event, None, tuple[Bucket, ...]]:
    """The `buckets`, each with who updates it, by what `workers` and `optimizers` measure when they
    are asked, if that matters.

    Decided here for all: in an arena each side has the frames of its buckets, and no other.
    """
    section = spec.memory.optimizer
    if section.update_on == "device":
        return assign_updates(buckets, range(len(buckets)))
    anywhere = spec.cluster.optimizer_placement == "anywhere"
    if section.update_on == "host" or device == "cpu" or anywhere:
        return buckets
    rates = DeviceRates.slowest(ask([*workers], "measuring the links", "update_rates").values())
    host = ask([*optimizers], "measuring the optimizers", "update_rate")
    on_device: set[int] = set()
    for rank, worker in enumerate(workers):
        beside = [actor.name for actor in optimizers if actor.node == worker.node]
        served = sum(other.node == worker.node for other in workers)
        own = [bucket for bucket in buckets if bucket.rank == rank]
        split = split_updates(
            own,
            rates,
            host_parameters_per_s=sum(host[actor] for actor in beside) / served,
            slots=section.slots,
        )
        on_device |= split.on_device
        text = split.described(own, rates, section.slots)
        yield event("updates_divided", worker=worker.name, text=text)
    return assign_updates(buckets, on_device)
