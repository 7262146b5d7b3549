"""One rank's share of a transformers MoE model, and where each of its numbers lives globally.

Dense weights are sharded over all W ranks by FSDP2. Experts are cut over the expert group and the
vocabulary head over the vocabulary group; FSDP2 does not see them. Every parameter keeps its
canonical name, and the flat range of the global parameter that this rank holds: that is all the
optimizer needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from flatpeak.workers import attention
from flatpeak.workers.buckets import Range, Shard
from flatpeak.workers.checkpoint import kept_in_fp32, moe_layers
from flatpeak.workers.dispatch import DispatchOptions, DispatchReport, Routing, moe_forward
from flatpeak.workers.first_use import first_users
from flatpeak.workers.fsdp_meetings import watch_meetings
from flatpeak.workers.logits import Logits, logits_of
from flatpeak.workers.parallel import Axis, Groups
from flatpeak.workers.partition import part
from flatpeak.workers.recompute_probe import value_needed_in_recompute
from flatpeak.workers.routers import RouterLoad
from flatpeak.workers.support import ROUTER_BIAS, check_supported, decoder_of
from flatpeak.workers.tied_head import fsdp_rows
from flatpeak.workers.vocabulary import ring_cross_entropy

EXPERTS_NAME = "flatpeak"
GradientSink = Callable[[nn.Parameter, Tensor], None]


class DispatchLog:
    """What the dispatch of one step did, over all layers and microbatches of this rank."""

    def __init__(self) -> None:
        self.report = DispatchReport()

    def begin_step(self) -> None:
        self.report = DispatchReport()

    def add(self, routing: Routing) -> None:
        self.report = self.report.including(routing)


@dataclass
class ExpertsContext:
    """What the experts function of one layer must know; bound to its module at build time."""

    axis: Axis
    options: DispatchOptions
    load: RouterLoad
    dispatched: DispatchLog
    layer: int
    value_needed_in_recompute: bool
    sink: GradientSink | None = None


def experts_forward(
    experts: nn.Module, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """transformers' experts interface, over the expert group. hidden [N, H], the others [N, k]."""
    context: ExpertsContext = cast(Any, experts).flatpeak_experts
    context.load.count(context.layer, expert_ids)
    return moe_forward(
        experts,
        hidden,
        expert_ids,
        expert_weights,
        group=context.axis.group,
        options=context.options,
        grad_sink=context.sink,
        value_needed_in_recompute=context.value_needed_in_recompute,
        on_routing=context.dispatched.add,
    )


class VocabularyHead(nn.Module):
    """Stands in for the model's `lm_head`: gives the loss of every token instead of its logits.

    `weight` is this rank's rows of an untied head, or the whole tied embedding, of which the rows
    are cut. With no `targets` set the hidden states pass through. `sink` gets the fp32 gradient of
    the rows, tied or not; without one it goes through autograd. Where `z_loss` or
    `label_smoothing` add to the loss, `nll` is the sum of the tokens' negative log likelihoods.
    """

    def __init__(
        self, weight: nn.Parameter, *, vocab_size: int, axis: Axis, tied: bool, logits: Logits
    ) -> None:
        super().__init__()
        self.weight = weight
        self.rows = part(vocab_size, axis.degree, axis.index)
        self.vocab_size, self.axis, self.tied, self.logits = vocab_size, axis, tied, logits
        self.token_tile: int | None = None
        self.schedule = "auto"
        self.z_loss = self.label_smoothing = 0.0
        self.targets: Tensor | None = None
        self.sink: Callable[[Tensor], None] | None = None
        self.output: Tensor | None = None
        self.nll: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, s, H] to the loss of each token [B, s] (fp32, 0 where ignored)."""
        if self.targets is None:
            return hidden
        weight = self.weight
        if self.tied:
            weight = weight[slice(*self.rows)]
            if self.sink is not None:
                weight = weight.detach()  # autograd must not wait for what the sink gets
        plain = not self.z_loss and not self.label_smoothing
        losses = ring_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.targets.reshape(-1),
            weight,
            group=self.axis.group,
            vocab_size=self.vocab_size,
            token_tile=self.token_tile,
            schedule=self.schedule,
            grad_sink=self.sink,
            nll_sink=None if plain else self._keep_nll,
            logit_scale=self.logits.scale,
            soft_cap=self.logits.soft_cap,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
        )
        # A copy of N numbers: FSDP2 hangs its hooks on what a module returns, and warns of views.
        self.output = losses.view(hidden.shape[:-1]).clone()
        return self.output

    def _keep_nll(self, values: Tensor) -> None:
        self.nll = values.sum(dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """A parameter (or balanced buffer) as this rank holds it.

    `tensor` holds the elements [start, stop) of the global parameter `name`, flattened. Of these
    the rank *owns* [own_start, own_stop): it alone hands their gradient to the optimizer. The two
    differ where replicas hold the same range.
    """

    name: str
    tensor: Tensor
    start: int
    stop: int
    own_start: int
    own_stop: int
    decay: bool
    axis: Axis | None = None
    rule: str = "adamw"
    parameter: nn.Parameter | None = None

    @property
    def flat(self) -> Tensor:
        return self.tensor.detach().view(-1)

    def shard(self, rank: int) -> Shard:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        owned = Range(self.name, self.own_start, self.own_stop)
        return Shard(range=owned, rank=rank, dtype=dtype, decay=self.decay, rule=self.rule)


@dataclass(kw_only=True)
class ShardedModel:
    model: PreTrainedModel
    groups: Groups
    head: VocabularyHead
    sequence: attention.SequenceContext
    load: RouterLoad
    dispatched: DispatchLog
    experts: list[ExpertsContext]
    moe_names: list[str]
    users: dict[nn.Module, list[LocalParameter]]
    """By the module whose call needs them first, in the order of the calls."""

    @property
    def parameters(self) -> list[LocalParameter]:
        """In the order of first use in the forward pass."""
        return [parameter for own in self.users.values() for parameter in own]

    def fsdp_modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def forward(self, inputs: Tensor, positions: Tensor, targets: Tensor | None) -> Tensor | None:
        """Runs the model on [B, s] token ids; returns the loss of every token, [B, s]."""
        self.head.targets = targets
        # What the family does to its logits after the head is in the loss already, and not read.
        self.model(
            input_ids=inputs,
            position_ids=positions,  # global: a rank's tokens do not start at 0
            use_cache=False,
            output_router_logits=False,
        )
        losses, self.head.output, self.head.targets = self.head.output, None, None
        return losses


def _cut_experts(model: PreTrainedModel, axis: Axis) -> dict[str, tuple[int, int]]:
    """Keeps this rank's experts of every layer. Returns rows [start, stop) by parameter name."""
    rows = {}
    for prefix, experts in moe_layers(model):
        total: int = cast(Any, experts).num_experts
        start, stop = part(total, axis.degree, axis.index)
        for name, parameter in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, nn.Parameter(parameter.detach()[start:stop].clone()))
            rows[f"{prefix}.{name}"] = (start, stop)
    return rows


def _cut_head(model: PreTrainedModel, axis: Axis) -> VocabularyHead:
    weight, tied = model.lm_head.weight, model.lm_head.weight is model.get_input_embeddings().weight
    vocab_size = weight.shape[0]
    start, stop = part(vocab_size, axis.degree, axis.index)
    if not tied:
        weight = nn.Parameter(weight.detach()[start:stop].clone())
    head = VocabularyHead(
        weight, vocab_size=vocab_size, axis=axis, tied=tied, logits=logits_of(model)
    )
    model.lm_head = head
    return head


def _shard_dense(model: PreTrainedModel, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    decoder = decoder_of(model)
    head = model.lm_head

    # Every parameter is computed with in the dtype that it has; gradients are summed in fp32.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)

    def shard(module: Any) -> None:
        fully_shard(module, mesh=mesh, ignored_params=ignored, mp_policy=policy)

    dtypes = {parameter.dtype for parameter in model.parameters()}
    # A group of FSDP2 has one dtype, so a router kept in fp32 needs a group of its own.
    for layer in decoder.layers:
        if len(dtypes) > 1:
            for module in layer.modules():
                own = [p for p in module.parameters(recurse=False) if p not in ignored]
                if own and all(p.dtype == torch.float32 for p in own):
                    shard(module)
        shard(layer)
    # The root's own group would stay gathered after a forward pass and ignore refreshed weights, so
    # every parameter belongs to a group below it; tied weights must share one.
    embedding = model.get_input_embeddings()
    if head.tied:
        shard([embedding, decoder.norm, head])
    else:
        shard(embedding)
        shard(decoder.norm)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the global token count, so gradients are summed, not averaged.
            # The first call alone is refused by gloo, the second alone still averages.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            watch_meetings(module)


def _materialise(model: PreTrainedModel, device: torch.device) -> None:
    model.to_empty(device=device)
    for module in model.modules():
        persistent = module._non_persistent_buffers_set
        if persistent and not any(True for _ in module.parameters(recurse=False)):
            model._init_weights(module)  # rotary frequencies are not part of any checkpoint


def _replica_part(start: int, stop: int, axis: Axis) -> tuple[int, int]:
    a, b = part(stop - start, len(axis.replica_ranks), axis.replica)
    return start + a, start + b


def decays(name: str, dims: int) -> bool:
    # The field's rule: no decay on norms and biases, whatever extra dimension experts give them.
    return dims >= 2 and not name.endswith("bias")


def _local_parameters(
    model: PreTrainedModel, groups: Groups, expert_rows: dict[str, tuple[int, int]]
) -> Iterator[LocalParameter]:
    world, rank = groups.layout.world, groups.rank
    for name, parameter in model.named_parameters():
        decay = decays(name, parameter.dim())
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            row = parameter.numel() // max(1, parameter.shape[0])
            start = fsdp_rows(parameter.shape[0], world, rank)[0] * row
            stop = start + local.numel()
            own, axis = (start, stop), None
        else:
            axis = groups.expert if name in expert_rows else groups.vocabulary
            first = expert_rows[name][0] if name in expert_rows else model.lm_head.rows[0]
            local = parameter
            row = parameter.numel() // max(1, parameter.shape[0])
            start, stop = first * row, first * row + parameter.numel()
            own = _replica_part(start, stop, axis)
        yield LocalParameter(
            name=name,
            tensor=local,
            start=start,
            stop=stop,
            own_start=own[0],
            own_stop=own[1],
            decay=decay,
            axis=axis,
            parameter=parameter,
        )
    for name, buffer in model.named_buffers():
        if name.endswith(ROUTER_BIAS):
            owner = (0, buffer.numel()) if rank == 0 else (0, 0)
            yield LocalParameter(
                name=name,
                tensor=buffer,
                start=0,
                stop=buffer.numel(),
                own_start=owner[0],
                own_stop=owner[1],
                decay=False,
                rule="bias",
            )


def shard_model(
    model: PreTrainedModel,
    *,
    groups: Groups,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    dispatch: DispatchOptions,
) -> ShardedModel:
    """Turns a model on the meta device into this rank's share of it, with weights not yet set.

    Collective over the world. `mesh` has one dimension of W ranks.
    """
    check_supported(model)
    value_needed = value_needed_in_recompute(model, decoder_of(model).layers)
    attention.check_degree(model.config, groups.sequence.degree)
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
    model.set_experts_implementation(EXPERTS_NAME)
    fp32 = kept_in_fp32(model)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in fp32 else dtype)
    expert_rows = _cut_experts(model, groups.expert)
    head = _cut_head(model, groups.vocabulary)
    ignored = {p for name, p in model.named_parameters() if name in expert_rows}
    if not head.tied:
        ignored.add(head.weight)
    _shard_dense(model, mesh, ignored)
    _materialise(model, device)
    model.train()

    layers = moe_layers(model)
    total = cast(Any, layers[0][1]).num_experts
    load = RouterLoad(layers=len(layers), experts=total, device=device)
    dispatched, contexts = DispatchLog(), []
    for index, (_, experts) in enumerate(layers):
        context = ExpertsContext(
            axis=groups.expert,
            options=dispatch,
            load=load,
            dispatched=dispatched,
            layer=index,
            value_needed_in_recompute=value_needed,
        )
        cast(Any, experts).flatpeak_experts = context
        contexts.append(context)
    sequence = attention.SequenceContext(group=groups.sequence.group, degree=groups.sequence.degree)
    attention.bind(model, sequence)
    local = {entry.name: entry for entry in _local_parameters(model, groups, expert_rows)}
    users = first_users(model, local, tied=head.tied)
    return ShardedModel(
        model=model,
        groups=groups,
        head=head,
        sequence=sequence,
        load=load,
        dispatched=dispatched,
        experts=contexts,
        moe_names=[name for name, _ in layers],
        users={module: [local[name] for name in names] for module, names in users.items()},
    )
