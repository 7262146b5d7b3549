"""Weights on their way back: in which order, ahead of whom, and what is not copied at all."""

import threading

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from flatpeak.workers.arena import Arena
from flatpeak.workers.buckets import Bucket, Range
from flatpeak.workers.errors import ClusterError, WaitTimeout
from flatpeak.workers.first_use import first_users
from flatpeak.workers.gradients import GradientStream
from flatpeak.workers.refresh import Ahead
from late_streams import Deferred
from tiny_models import tiny_config

CUTS = [
    [Range("a", 0, 90)],
    [Range("a", 90, 120), Range("norm", 0, 7), Range("b", 0, 30)],
    [Range("b", 30, 120)],
]


class Rig:
    """Three buckets, whose weights at `version` are 100 * version + index, and where they go."""

    def __init__(self, folder):
        buckets = [
            Bucket(n, 0, 0, tuple(held), "bfloat16", True, "adamw") for n, held in enumerate(CUTS)
        ]
        self.arena = Arena.create(folder / "0.arena", run="r", buckets=buckets, spare_frames=1)
        self.stream = GradientStream(buckets, {0: self.arena})
        self.out = {
            name: torch.full((size,), -1.0)
            for name, size in {"a": 120, "norm": 7, "b": 120}.items()
        }
        self.deliveries = self.stream.deliveries((n, 0, out) for n, out in self.out.items())

    def update(self, index, version):
        frame = self.arena.begin_update(index)
        frame.weights.fill_(100 * version + index)
        self.arena.commit_update(index, version)

    def values(self):
        """Of what has come, by bucket."""
        parts = self.out["a"].split([90, 30]), [self.out["norm"]], self.out["b"].split([30, 90])
        a, norm, b = parts
        return [set(torch.cat(part).tolist()) for part in ([a[0]], [a[1], *norm, b[0]], [b[1]])]


def test_a_bucket_is_waited_for_once_and_copied_at_once(tmp_path):
    rig, waits = Rig(tmp_path), []
    wait = rig.arena.wait_version
    rig.arena.wait_version = lambda i, *args, **kwargs: [waits.append(i), wait(i, *args, **kwargs)]
    for index in range(3):
        rig.update(index, 1)
    streams = Deferred()
    rig.stream.deliver(rig.deliveries, version=1, timeout_s=1, streams=streams)
    assert waits == [0, 1, 2]
    assert [entry for entry in streams.log if entry[0] == "issued"] == [
        ("issued", "weights", n) for n in range(3)
    ]
    assert rig.values() == [{100.0}, {101.0}, {102.0}]


def test_copies_run_after_what_still_reads_the_weights_and_while_others_are_waited_for(tmp_path):
    rig, streams = Rig(tmp_path), Deferred()
    reading = streams.issue("reader", lambda: None)
    rig.update(0, 1)
    wait = rig.arena.wait_version
    issued = []

    def late(index, version, **kwargs):
        issued.append(streams.counts["weights"])
        if rig.arena.version(index) < version:
            rig.update(index, version)
        wait(index, version, **kwargs)

    rig.arena.wait_version = late
    rig.stream.deliver(rig.deliveries, version=1, timeout_s=1, streams=streams, after=(reading,))
    assert issued == [0, 1, 2]
    assert streams.log.index(("done", "reader", 0)) < streams.log.index(("done", "weights", 0))
    assert rig.values() == [{100.0}, {101.0}, {102.0}]


def test_what_is_in_place_is_waited_for_and_not_copied(tmp_path):
    rig = Rig(tmp_path)
    for index in (0, 1):
        rig.update(index, 1)
    first = rig.deliveries[:2]
    seen = []

    def in_place(bucket, version):
        seen.append((bucket, version, rig.arena.version(bucket)))
        return bucket == 1

    rig.stream.deliver(first, version=1, timeout_s=1, in_place=in_place)
    assert seen == [(0, 1, 1), (1, 1, 1)]
    assert rig.values() == [{100.0}, {-1.0}, {-1.0}]
    with pytest.raises(WaitTimeout, match="bucket 2 of arena 0"):
        rig.stream.deliver(
            rig.deliveries, version=1, timeout_s=0.01, in_place=lambda bucket, version: True
        )


def test_a_frame_that_is_given_away_under_a_copy_is_noticed(tmp_path):
    rig, streams = Rig(tmp_path), Deferred()
    for index in range(3):
        rig.update(index, 1)
    streams.seen = lambda: rig.arena.version(0) == 1 and rig.update(0, 2)
    with pytest.raises(ClusterError, match=r"version 1 were asked of bucket 0 .* holds version 2"):
        rig.stream.deliver(rig.deliveries[:1], version=1, timeout_s=1, streams=streams)


def test_modules_are_served_in_order_ahead_of_their_calls(tmp_path):
    rig = Rig(tmp_path)
    modules = [nn.Identity() for _ in range(3)]
    ahead = Ahead(
        lambda due: rig.stream.deliver(due, version=1, timeout_s=10),
        {module: [part] for module, part in zip(modules, rig.deliveries, strict=True)},
        timeout_s=20,
    )
    for index in (0, 1):
        rig.update(index, 1)
    ahead.wait_for(modules[1])
    assert rig.values() == [{100.0}, {101.0}, {-1.0}]
    ahead.wait_for(modules[0])
    rig.update(2, 1)
    ahead.join()
    assert rig.values() == [{100.0}, {101.0}, {102.0}]
    ahead.wait_for(modules[2])


def test_what_goes_wrong_ahead_reaches_all_who_still_wait(tmp_path):
    rig = Rig(tmp_path)
    modules = [nn.Identity() for _ in range(3)]
    rig.update(0, 1)
    ahead = Ahead(
        lambda due: rig.stream.deliver(due, version=1, timeout_s=0.05),
        {module: [part] for module, part in zip(modules, rig.deliveries, strict=True)},
        timeout_s=20,
    )
    ahead.join()
    for module in modules[1:]:
        with pytest.raises(WaitTimeout, match="bucket 1 of arena 0 did not reach"):
            ahead.wait_for(module)
    assert rig.values() == [{100.0}, {-1.0}, {-1.0}]


def test_a_copy_that_hangs_is_named_and_not_waited_for_longer():
    modules, released = [nn.Identity() for _ in range(3)], threading.Event()

    def deliver(due):
        if due:
            released.wait(60)

    ahead = Ahead(deliver, {modules[0]: (), modules[1]: [None], modules[2]: ()}, timeout_s=0.05)
    ahead.wait_for(modules[0])
    for wait in (lambda: ahead.wait_for(modules[1]), ahead.join):
        with pytest.raises(WaitTimeout, match=r"got to module 2 of 3 .* for 0.05 s"):
            wait()
    released.set()


def users_of(family, **changes):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    tied = bool(changes.get("tie_word_embeddings"))
    name_of = {module: name for name, module in model.named_modules()}
    users = first_users(model, names, tied=tied)
    assert sorted(name for own in users.values() for name in own) == sorted(names)
    return {name_of[module]: own for module, own in users.items()}


def test_weights_belong_to_the_call_that_needs_them_first():
    users = users_of("deepseek_v3")
    assert list(users) == [
        "",  # rotary frequencies
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.1.mlp.experts",
        "model.norm",
        "lm_head",
    ]
    prefix = "model.layers.1."
    experts = [f"{prefix}mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    assert users[f"{prefix}mlp.experts"] == experts
    layer = users[prefix[:-1]]
    assert all(name.startswith(prefix) and name not in experts for name in layer)
    # The bias that balances the experts is needed with the router, before all later layers.
    assert f"{prefix}mlp.gate.e_score_correction_bias" in layer


def test_a_tied_head_and_the_norm_before_it_come_with_the_embedding():
    users = users_of("qwen3_moe", tie_word_embeddings=True)
    assert "model.norm" not in users
    assert "lm_head" not in users
    assert set(users["model.embed_tokens"]) == {"model.embed_tokens.weight", "model.norm.weight"}
