"""Where a step was not finite, in words: one screen of text."""

import math
from collections.abc import Iterator, Sequence

from tandem.model.decoder import Decoder
from tandem.trainer.nan_detector import Findings, Place

MOST_LAYERS = 12
MOST_PARAMETERS = 3


def describe_weights(model: Decoder) -> str:
    """How large the weights of ``model`` are."""
    largest, where, bad = 0.0, "", []
    for name, parameter in model.named_parameters():
        value = parameter.detach().abs().amax().item() if parameter.numel() else 0.0
        if not math.isfinite(value):
            bad.append(name)
        elif value > largest:
            largest, where = value, name
    if bad:
        return f"the weights of {_few(bad)} are not finite"
    return f"the weights are finite, the largest {largest:.2g} in {where}"


def describe(found: Findings, layers: int, parameters: int) -> Iterator[str]:
    """Lines about a step of a model of ``layers`` and so many ``parameters``: what came first, then a line a layer."""
    if not (found.forward or found.backward or found.gradients):
        yield "every output of every layer and every gradient is finite"
        return
    for number, loss in enumerate(found.losses):
        if not math.isfinite(loss):
            yield f"the first micro-batch whose loss is not finite: {number} of {len(found.losses)} (from 0), {loss}"
            break
    yield "forward: " + (f"first not finite {_where('the output', found.forward[0])}" if found.forward else "every output is finite")
    gradient = "the gradient of the output"
    yield "backward: " + (f"first not finite {_where(gradient, found.backward[0])}" if found.backward else f"{gradient} of every layer is finite")
    yield f"gradients of {len(found.gradients)} of {parameters} parameters are not finite"
    shown = 0
    for layer in range(-1, layers + 1):
        lines = list(_of_layer(found, layer, layers))
        if lines:
            shown += 1
            if shown <= MOST_LAYERS:
                yield from lines
    if shown > MOST_LAYERS:
        yield f"  and {shown - MOST_LAYERS} more layers"


def _of_layer(found: Findings, layer: int, layers: int) -> Iterator[str]:
    """A line of a layer, where something of it is not finite."""
    places = [place for place in found.forward if place.layer == layer]
    name = "before the layers" if layer < 0 else "behind the layers" if layer == layers else f"layer {layer}"
    bad = {key: value for key, value in found.gradients.items() if _layer_of(key, layers) == layer}
    if not places and not bad:
        return
    output = f"output from {_short(places[0])}" if places else "output finite"
    if bad:
        first = min(gradient.micro_batch for gradient in bad.values())
        held = [f"{key.removeprefix(f'layers.{layer}.')} ({gradient.count} of {gradient.total})" for key, gradient in bad.items()]
        yield f"  {name}: {output}; gradients from micro-batch {first}: {_few(held)}"
    else:
        yield f"  {name}: {output}; gradients finite"


def _layer_of(name: str, layers: int) -> int:
    """Where a parameter stands; a tied head counts as the embedding."""
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1])
    return -1 if parts[0] == "embed_tokens" else layers


def _where(what: str, place: Place) -> str:
    return f"is {what} of {place.what}: {_short(place)} ({place.value})"


def _short(place: Place) -> str:
    return f"micro-batch {place.micro_batch}, sequence {place.sequence}, token {place.position}"


def _few(names: Sequence[str]) -> str:
    more = len(names) - MOST_PARAMETERS
    return ", ".join(names[:MOST_PARAMETERS]) + (f" and {more} more" if more > 0 else "")
