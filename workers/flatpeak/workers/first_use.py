"""Which module's call needs a weight first.

The optimizer updates weights in this order and they come back in it, so that a call waits for its
own. Experts, most of the weights of a layer, have a call of their own: what the layer does before
it, attention above all, runs while they are updated.
"""

from collections.abc import Iterable, Iterator

from torch import nn
from transformers import PreTrainedModel

from flatpeak.workers.checkpoint import moe_layers
from flatpeak.workers.support import decoder_of


def first_users(
    model: PreTrainedModel, names: Iterable[str], *, tied: bool
) -> dict[nn.Module, list[str]]:
    """Which of `names`, parameters and buffers of `model`, the call of a module needs first.

    Modules come in the order of the calls, and each one's names in the order given. With `tied`
    weights the embedding's call needs the norm at the end and the head as well.
    """
    callers = _callers(model)
    users: dict[nn.Module, list[str]] = {module: [] for module in callers.values()}
    if tied:
        # One group of FSDP2: they are gathered together, for the embedding.
        embedding, norm = model.get_input_embeddings(), decoder_of(model).norm
        together = (norm, model.lm_head)
        callers |= {name: embedding for name, module in callers.items() if module in together}
    for name in names:
        users[next(callers[above] for above in _above(name) if above in callers)].append(name)
    return {module: own for module, own in users.items() if own}


def _callers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, in the order of the calls; the first is the model, for all outside of the others."""
    decoder = decoder_of(model)
    modules: list[nn.Module] = [model, model.get_input_embeddings()]
    experts = {module for _, module in moe_layers(model)}
    for layer in decoder.layers:
        modules += [layer, *(module for module in layer.modules() if module in experts)]
    modules += [decoder.norm, model.lm_head]
    name_of = {module: name for name, module in model.named_modules()}
    return {name_of[module]: module for module in modules}


def _above(name: str) -> Iterator[str]:
    """The names of the modules around it, from the innermost to the model's, which is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name
