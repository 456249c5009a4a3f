"""Predicts the seconds of a training step on GPUs. Imports no torch.

The slowest rank computes its layers for every micro-batch, waits for the pipeline, exchanges gradients and parameters and updates its weights;
``docs/planner/time.md`` derives each term.
"""

from functools import reduce
from operator import add

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.collectives import send_seconds
from tandem.estimate.training.data_parallel import Shared, exchange_seconds, optimizer_seconds
from tandem.estimate.training.efficiency import FITTED, Efficiency
from tandem.estimate.training.held_parameters import NOTHING, held_on_span
from tandem.estimate.training.host import waited_seconds
from tandem.estimate.training.layer_time import ACTIVATION_BYTES, NO_PASSES, LayerTimes, Passes
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.pipeline import bubble_seconds
from tandem.estimate.training.step_time import StepTime
from tandem.layout.pipeline_stages import Span, own_spans, spans_of
from tandem.layout.shapes import ModelShapes


def predict_step_time(shapes: ModelShapes, layout: TrainingLayout, hardware: Hardware, given: Efficiency = FITTED) -> StepTime:
    """Returns the seconds of a step of ``shapes`` in ``layout`` on ``hardware``. Raises ``UserError`` for a pipeline and ``ValueError`` for ranks that do not
    divide the model."""
    parallel, micro_batches = layout.parallel, max(1, layout.micro_batches)
    ranks = _passes_of_ranks(shapes, layout, hardware, given)
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank][0].seconds)
    passes, spans = ranks[slowest]
    sent = _pipeline_seconds(shapes, layout, hardware, given)
    # Ahead of a whole micro-batch the host does not run either if all its kernels take longer to start than to compute.
    waited = [waited_seconds(layout, each.kernels, each.seconds) for each, _ in ranks]
    rank_seconds = [each.seconds + wait + parallel.virtual_stages * sent for (each, _), wait in zip(ranks, waited, strict=True)]
    shared = _shared(shapes, layout, spans)
    once, recomputed = passes.forward + passes.backward, passes.recomputed
    backward_s = passes.backward.total + recomputed.total
    return StepTime(
        products=micro_batches * once.products,
        attention=micro_batches * once.attention,
        memory_bound=micro_batches * once.memory_bound,
        recomputed=micro_batches * (recomputed.products + recomputed.attention + recomputed.memory_bound),
        tensor_communication=micro_batches * (once.tensor + recomputed.tensor),
        data_communication=exchange_seconds(hardware, layout, shared, sum(each.stop - each.start for each in spans), passes.forward.total, backward_s, given),
        pipeline_communication=micro_batches * parallel.virtual_stages * sent,
        expert_communication=micro_batches * (once.expert + recomputed.expert),
        context_communication=micro_batches * (once.context + recomputed.context),
        bubble=bubble_seconds(rank_seconds, slowest, parallel.virtual_stages),
        optimizer=optimizer_seconds(hardware, layout, shared, given),
        host=micro_batches * (once.host + recomputed.host + waited[slowest]),
    )


def _passes_of_ranks(shapes: ModelShapes, layout: TrainingLayout, hardware: Hardware, given: Efficiency) -> list[tuple[Passes, list[Span]]]:
    """Returns the passes of a micro-batch through the layers of each pipeline rank, and these layers. The last rank has the head."""
    times = LayerTimes(shapes, layout, hardware, given)
    known: dict[tuple[int | None, bool, bool], Passes] = {}
    stages, ranks = spans_of(layout.parallel, shapes), []
    for rank in range(layout.parallel.pipeline):
        spans, counts = own_spans(layout.parallel, stages, rank), dict[tuple[int | None, bool, bool], int]()
        for layer in (layer for span in spans for layer in range(span.start, span.stop)):
            kind = (shapes.window(layer), shapes.experts_of(layer) is not None, shapes.linear_attention_of(layer) is not None)
            counts[kind] = counts.get(kind, 0) + 1
        for kind in counts.keys() - known.keys():
            window, has_experts, is_linear = kind
            known[kind] = times.layer(window, shapes.experts if has_experts else None, shapes.linear_attention if is_linear else None)
        passes = reduce(add, (known[kind] * count for kind, count in counts.items()), NO_PASSES)
        ranks.append((passes + times.head() if spans[-1].is_last else passes, list(spans)))
    return ranks


def _shared(shapes: ModelShapes, layout: TrainingLayout, spans: list[Span]) -> list[Shared]:
    """Returns the parameters of a rank: those that every data-parallel rank has, and those of its experts."""
    parallel = layout.parallel
    whole = layout.whole_vocabulary
    held = reduce(add, (held_on_span(shapes, span, parallel.tensor, parallel.expert, whole_embedding=whole) for span in spans), NOTHING)
    ranks = parallel.data * parallel.context
    shared = [Shared(held.dense, ranks, parallel.tensor)]
    if held.expert:
        shared.append(Shared(held.expert, ranks // parallel.expert, parallel.tensor * parallel.expert))
    return shared


def _pipeline_seconds(shapes: ModelShapes, layout: TrainingLayout, hardware: Hardware, given: Efficiency) -> float:
    """Returns the exposed seconds of a micro-batch between two stages: its activations and their gradient. Interleaved stages compute others meanwhile."""
    parallel = layout.parallel
    if parallel.pipeline == 1:
        return 0.0
    # Ranks of a tensor-parallel group send a part each and gather it at the other side (Narayanan et al., 2021, section 4.1).
    moved = ACTIVATION_BYTES * layout.micro_batch * layout.sequence * shapes.hidden_size / (parallel.tensor * parallel.context)
    both = 2 * send_seconds(hardware, parallel.data * parallel.context * parallel.tensor, moved, given)
    return both * (given.contention if parallel.virtual_stages > 1 else 1.0)
