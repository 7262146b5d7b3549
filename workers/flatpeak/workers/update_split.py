"""Which buckets are updated on the device and which by the optimizer actors; no torch here.

A bucket on the device passes three stages: state and gradient in (h seconds), the update (u), state
and weights out (d). With s slots a pipeline of them takes `max(h, u, d, (h + u + d) / s)` a bucket.
On the host an update is one pass over memory, and the weights alone go to the device.

One process decides for all ranks, and the decision travels with the buckets: both sides take the
frames of an arena from it, and two that saw it differently would write into the same ones. All
ranks get the same rates, the slowest ones, since each step waits for the slowest rank.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from flatpeak.workers.buckets import ITEM_BYTES, Bucket

UPDATE_ON = ("host", "device", "auto")
_STATE_BYTES = 12
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class DeviceRates:
    """What one device and its link sustain while all others of the node are busy too."""

    in_bytes_per_s: float
    out_bytes_per_s: float
    parameters_per_s: float

    @classmethod
    def slowest(cls, rates: Iterable["DeviceRates"]) -> "DeviceRates":
        rates = list(rates)
        return cls(
            min(rate.in_bytes_per_s for rate in rates),
            min(rate.out_bytes_per_s for rate in rates),
            min(rate.parameters_per_s for rate in rates),
        )


@dataclass(frozen=True)
class Stages:
    """Seconds of a bucket in each stage on the device."""

    h: float
    u: float
    d: float

    @classmethod
    def of(cls, bucket: Bucket, rates: DeviceRates) -> "Stages":
        back = _STATE_BYTES + (ITEM_BYTES[bucket.dtype] if bucket.dtype != "float32" else 0)
        return cls(
            h=bucket.size * (_STATE_BYTES + _GRADIENT_BYTES) / rates.in_bytes_per_s,
            u=bucket.size / rates.parameters_per_s,
            d=bucket.size * back / rates.out_bytes_per_s,
        )

    @property
    def through(self) -> float:
        return self.h + self.u + self.d

    def period(self, slots: int) -> float:
        return max(self.h, self.u, self.d, self.through / slots)


@dataclass(frozen=True)
class Split:
    """The indices of a rank's buckets on the device, and when each side is expected to be done."""

    on_device: frozenset[int]
    device_s: float
    host_s: float

    def described(self, buckets: Sequence[Bucket], rates: DeviceRates, slots: int) -> str:
        """One line for people: what was decided, on which numbers."""
        largest = max(buckets, key=lambda bucket: bucket.size)
        stages = Stages.of(largest, rates)
        h, u, d = (1e3 * seconds for seconds in (stages.h, stages.u, stages.d))
        return (
            f"{len(self.on_device)} of {len(buckets)} buckets are updated on the device: "
            f"{1e3 * self.device_s:.1f} ms there, {1e3 * self.host_s:.1f} ms on the host; a bucket "
            f"takes {1e3 * stages.period(slots):.2f} ms in {slots} slots (in {h:.2f}, update "
            f"{u:.2f}, out {d:.2f}) at {rates.in_bytes_per_s / 1e9:.1f} GB/s in and "
            f"{rates.out_bytes_per_s / 1e9:.1f} out"
        )


def split_updates(
    buckets: Sequence[Bucket],
    rates: DeviceRates,
    *,
    host_parameters_per_s: float,
    slots: int,
) -> Split:
    """Divide one rank's `buckets`, in order of need, so that both sides finish together.

    Each bucket goes to the side that would have it ready first, the device on top of all that went
    there before. So early buckets come from both sides at once, and the end is at most one bucket
    later than that of the best division. `host_parameters_per_s` is what the actors do for this
    rank while they work for all.
    """
    chosen, device, device_end, host = set(), 0.0, 0.0, 0.0
    for bucket in buckets:
        stages = Stages.of(bucket, rates)
        host_end = host + bucket.size / host_parameters_per_s
        if can_be_on_device(bucket) and device + stages.through < host_end:
            chosen.add(bucket.index)
            device_end = device + stages.through
            device += stages.period(slots)
        else:
            host = host_end
            # The weights share the way in.
            device += bucket.size * ITEM_BYTES[bucket.dtype] / rates.in_bytes_per_s
    return Split(frozenset(chosen), device_end, host)


def can_be_on_device(bucket: Bucket) -> bool:
    """Balancing biases are a handful of numbers with a rule of their own."""
    return bucket.rule == "adamw"


def assign_updates(buckets: Sequence[Bucket], on_device: Container[int]) -> tuple[Bucket, ...]:
    """`buckets`, of which those with an index in `on_device` are updated there, if they can be."""
    return tuple(
        replace(bucket, update_on="device")
        if bucket.index in on_device and can_be_on_device(bucket)
        else bucket
        for bucket in buckets
    )
