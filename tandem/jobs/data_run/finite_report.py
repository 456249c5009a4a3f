"""Reports where a step was not finite, in one screen of text."""

import math
from collections.abc import Iterator, Sequence

from tandem.model.decoder import Decoder
from tandem.trainer.nan_detector import Findings, Place

MOST_LAYERS = 12
MOST_PARAMETERS = 3


def describe_weights(model: Decoder) -> str:
    """Returns a line on the largest weight of ``model``, or on those that are not finite."""
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


def describe(findings: Findings, layers: int, parameters: int) -> Iterator[str]:
    """Yields lines about a step of a model of ``layers`` layers and ``parameters`` parameters: first the earliest finding, then one line for each
    layer."""
    if not (findings.forward or findings.backward or findings.gradients):
        yield "every output of every layer and every gradient is finite"
        return
    for number, loss in enumerate(findings.losses):
        if not math.isfinite(loss):
            yield f"the first micro-batch whose loss is not finite: {number} of {len(findings.losses)} (from 0), {loss}"
            break
    yield "forward: " + (f"first not finite {_where('the output', findings.forward[0])}" if findings.forward else "every output is finite")
    gradient = "the gradient of the output"
    yield "backward: " + (f"first not finite {_where(gradient, findings.backward[0])}" if findings.backward else f"{gradient} of every layer is finite")
    yield f"gradients of {len(findings.gradients)} of {parameters} parameters are not finite"
    shown = 0
    for layer in range(-1, layers + 1):
        lines = list(_of_layer(findings, layer, layers))
        if lines:
            shown += 1
            if shown <= MOST_LAYERS:
                yield from lines
    if shown > MOST_LAYERS:
        yield f"  and {shown - MOST_LAYERS} more layers"


def _of_layer(findings: Findings, layer: int, layers: int) -> Iterator[str]:
    """Yields a line on ``layer`` if one of its outputs or gradients is not finite."""
    places = [place for place in findings.forward if place.layer == layer]
    name = "before the layers" if layer < 0 else "after the layers" if layer == layers else f"layer {layer}"
    bad = {key: value for key, value in findings.gradients.items() if _layer_of(key, layers) == layer}
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
    """Returns the layer of a parameter: -1 before the layers (a tied head counts as the embedding), ``layers`` after them."""
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
