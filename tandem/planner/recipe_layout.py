"""The layout that a recipe has, as the planner scores it. Imports no torch."""

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.estimate.training.layout import DraftTraining, TrainingLayout
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.eagle3 import EMBEDDING, MOST_DRAFT_VOCABULARY, eagle3_shapes
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.eagle3_config import read_eagle3_of
from tandem.model.huggingface.weight_files import tensor_names
from tandem.planner.model_input import recipe_shapes
from tandem.planner.recipe_step import batch_sequences, sequence_tokens


def recipe_layout(recipe: AnyRecipe, shapes: ModelShapes, *, on_cpu: bool = False) -> TrainingLayout:
    """Returns the layout of a recipe with Tandem's own trainer, on GPUs or ``on_cpu``: a micro-batch is as many of its longest sequences as
    ``trainer.micro_batch_tokens`` admit."""
    sequence, batch = sequence_tokens(recipe, shapes), batch_sequences(recipe)
    trainer, parallel = recipe.trainer, recipe.parallel
    each = max(1, batch // parallel.data)
    micro_batch = max(1, min(each, trainer.micro_batch_tokens // sequence))
    while each % micro_batch:
        micro_batch -= 1
    return TrainingLayout(
        parallel, sequence, max(batch // parallel.data, 1) * parallel.data, micro_batch, trainer.multiplies_in, trainer.recompute, trainer.offload,
        chunked_head=True, trainer=trainer, on_cpu=on_cpu, pass_tokens=pass_tokens(recipe, sequence, each),
        is_forked=isinstance(recipe, Recipe) or parallel.world > 1, draft=draft_of(recipe, shapes),
    )  # fmt: skip


def draft_of(recipe: AnyRecipe, shapes: ModelShapes) -> DraftTraining | None:
    """Returns the draft head that a recipe trains beside its model of ``shapes``; ``None`` if it trains the model. Raises ``UserError`` for a head of another
    model."""
    if not isinstance(recipe, PretrainRecipe) or not recipe.trains_draft:
        return None
    algorithm = recipe.algorithm
    if algorithm.init_from:
        head = read_eagle3_of(algorithm.init_from, shapes, own_embedding=EMBEDDING in tensor_names(algorithm.init_from))
    else:
        head = eagle3_shapes(shapes, min(algorithm.draft_vocab_size or MOST_DRAFT_VOCABULARY, shapes.vocab_size))
    return DraftTraining(head, algorithm.draft_steps)


def pass_tokens(recipe: AnyRecipe, sequence: int, each: int) -> int:
    """Returns the tokens of the largest micro-batch, of which one sequence longer than ``trainer.micro_batch_tokens`` is one by itself. ``each``: sequences
    of a data-parallel rank in a step."""
    if isinstance(recipe, PretrainRecipe):
        return recipe.most_tokens
    return min(max(recipe.trainer.micro_batch_tokens, sequence), each * sequence)


def predicted_memory(recipe: AnyRecipe) -> int:
    """Returns the bytes that training takes of the fullest GPU."""
    shapes = recipe_shapes(recipe.model)
    return predict_rank_memory(shapes, recipe_layout(recipe, shapes)).total
