"""The bytes of one rank in a training step: the one memory model of ``tandem plan``, of the checks before a run and of the run's own predictions. Imports no
torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training import draft_head, literature, own_trainer
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.stage_bytes import StageBytes
from tandem.layout.pipeline_stages import Span, own_spans, spans_of, whole
from tandem.layout.shapes import ModelShapes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the fullest rank at the worst moment, by kind; they add up to ``total``. ``parameters``: in the precision of the products; ``master_weights``:
    the fp32 ones beside them. ``pipeline_stash``: activations of micro-batches that await their backward pass beside the current one. ``gathered``:
    parameters that ZeRO 3 has gathered. ``staged``: the copy in host memory that a checkpoint is written from, where a rank computes there too. ``context``:
    the process, its libraries and the driver."""

    parameters: int
    gradients: int
    optimizer: int
    master_weights: int
    activations: int
    pipeline_stash: int
    logits: int
    gathered: int
    communication: int
    fragmentation: int
    staged: int
    context: int

    @property
    def total(self) -> int:
        return int(sum(getattr(self, each.name) for each in fields(self)))

    @property
    def allocated(self) -> int:
        """Bytes beside those of a process that has only imported its modules, or of a GPU beside its context."""
        return self.total - self.context


def predict_rank_memory(shapes: ModelShapes, layout: TrainingLayout) -> RankMemory:
    """Returns the memory of the fullest rank of ``layout``; it is the same on all hardware. Raises ``UserError`` for a pipeline and ``ValueError`` for ranks
    that do not divide the model."""
    return max(memory_by_stage(shapes, layout), key=lambda memory: memory.total)


def memory_by_stage(shapes: ModelShapes, layout: TrainingLayout) -> list[RankMemory]:
    """Returns the memory of a rank of every pipeline rank, in their order."""
    return [_of_stage(shapes, layout, spans, rank) for rank, spans in enumerate(_stages(shapes, layout.parallel))]


def machine_bytes(shapes: ModelShapes, layout: TrainingLayout, ranks: int = 0) -> int:
    """Returns the bytes of the ``ranks`` that need most (0: all) together."""
    stages, parallel = memory_by_stage(shapes, layout), layout.parallel
    each = parallel.world // len(stages)
    every = [memory.total for memory in stages for _ in range(each)]
    if layout.draft is not None and each > parallel.data:
        # Of the tensor-parallel ranks of the last stage the first has the head.
        last = list(_stages(shapes, parallel))[-1]
        every[parallel.data - each :] = [_of_stage(shapes, layout, last, len(stages) - 1, is_first=False).total] * (each - parallel.data)
    totals = sorted(every, reverse=True)
    return sum(totals[: ranks or len(totals)])


def saved_by_stage(shapes: ModelShapes, layout: TrainingLayout) -> list[int]:
    """Returns the bytes that all passes which await their backward pass on a rank of every pipeline rank have saved, wherever they are."""
    passes = (chunks_in_flight(layout.parallel, layout.micro_batches, rank) for rank in range(layout.parallel.pipeline))
    stages = _stages(shapes, layout.parallel)
    return [int(most / len(spans) * _bytes(shapes, layout, spans).saved) for most, spans in zip(passes, stages, strict=True)]


def chunks_in_flight(parallel: ParallelConfig, micro_batches: int, rank: int) -> int:
    """Returns the most forward passes of a stage that await their backward pass on a pipeline rank: ``max_in_flight_micro_batches`` of its operations in
    closed form."""
    ranks, virtual = parallel.pipeline, parallel.virtual_stages
    if parallel.schedule == "gpipe" and ranks > 1:
        return micro_batches
    if virtual == 1:
        return min(micro_batches, ranks - rank)
    return min(micro_batches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)


def _stages(shapes: ModelShapes, parallel: ParallelConfig) -> Iterator[list[Span]]:
    """Yields the layers of every pipeline rank."""
    spans = spans_of(parallel, shapes) if parallel.pipeline > 1 else (whole(shapes.num_hidden_layers),)
    for rank in range(parallel.pipeline):
        yield own_spans(parallel, spans, rank)


def _bytes(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span], is_first: bool = True) -> StageBytes:
    if layout.draft is not None:
        return draft_head.stage_bytes(shapes, *layout.draft, layout, spans, is_first=is_first)
    return literature.stage_bytes(shapes, layout, spans) if layout.trainer is None else own_trainer.stage_bytes(shapes, layout, spans)


def _of_stage(shapes: ModelShapes, layout: TrainingLayout, spans: Sequence[Span], rank: int, *, is_first: bool = True) -> RankMemory:
    """``is_first``: of the tensor-parallel ranks of the stage."""
    held = _bytes(shapes, layout, spans, is_first)
    # The backward pass of a draft head follows its forward pass.
    in_flight = 1 if layout.draft is not None else chunks_in_flight(layout.parallel, layout.micro_batches, rank)
    passes = max(1.0, in_flight / len(spans))
    saved = min(passes * held.saved, held.most_saved)
    stash = min((passes - 1) * held.saved, max(0.0, held.most_saved - held.saved))
    if layout.trainer is not None and layout.micro_batches == 1:
        # In the only pass of a step gradients take the place of what was saved: none is left from a pass before.
        saved -= min(saved, held.gradients)
    comes_and_goes = saved + held.working + held.logits + held.gathered + held.reduced
    fragmentation = held.kept * (comes_and_goes + (held.states if held.keeps_states else 0)) + held.holes
    return RankMemory(
        parameters=held.parameters, gradients=held.gradients, optimizer=held.optimizer, master_weights=held.master_weights,
        activations=math.ceil(saved - stash + held.working), pipeline_stash=math.ceil(stash), logits=math.ceil(held.logits),
        gathered=math.ceil(held.gathered), communication=math.ceil(held.buffers + held.reduced),
        fragmentation=math.ceil(fragmentation), staged=held.staged, context=held.context,
    )  # fmt: skip
