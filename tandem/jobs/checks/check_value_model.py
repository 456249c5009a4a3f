"""Checks a model that reads the actor's tokens, to value them or as the reference: whether it is one, and of the same tokenizer."""

from pathlib import Path

from tandem.config.implementation import OWN, Implementation
from tandem.data.tokenizing.tokenize_plan import tokenizer_fingerprint
from tandem.jobs.checks.check_run import check_start_weights
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.types import UserError


def check_value_model(
    path: str, key: str, actor: Path, actor_shapes: ModelShapes, context_tokens: int, needs_head: bool = False, implemented_by: Implementation = OWN
) -> ModelShapes:
    """Returns the shapes of the model that ``key`` of a recipe names as ``path``.

    Raises ``UserError`` where it reads other tokens than the model in ``actor``, or fewer than ``context_tokens``, if it ``needs_head`` where it has no value
    head, and where its files of weights are missing or broken."""
    shapes = _check_reader(path, key, actor, actor_shapes, context_tokens, needs_head, implemented_by)
    if not implemented_by.is_transformers:
        # It may begin with a model that was saved without a head, whose tensors have other names: its files, their size and format alone are compared.
        check_start_weights(path, found_model(path), read_shapes(found_model(path), "none"))
    return shapes


def _check_reader(
    path: str, key: str, actor: Path, actor_shapes: ModelShapes, context_tokens: int, needs_head: bool, implemented_by: Implementation
) -> ModelShapes:
    folder = found_model(path)
    if not folder.is_dir():
        raise UserError(f"'{key}' is '{path}', which is not a folder; give a local Hugging Face folder, or OWNER/NAME of a model of the Hub")
    shapes = read_shapes(folder, "any", implemented_by)
    if needs_head and shapes.language_head:
        raise UserError(
            f"'{key}' is '{path}', a language model without a value head, which cannot score; name a model for sequence or token classification, such as one "
            "that algorithm.name reward_model trained"
        )
    tokenizers = [place / "tokenizer.json" for place in (actor, folder)]
    is_known = all(place.is_file() for place in tokenizers)
    is_same = tokenizer_fingerprint(actor) == tokenizer_fingerprint(folder) if is_known else shapes.vocab_size == actor_shapes.vocab_size
    if not is_same or shapes.vocab_size < actor_shapes.vocab_size:
        sizes = f"with {shapes.vocab_size} token ids where the actor's model has {actor_shapes.vocab_size}"
        raise UserError(f"'{key}' is '{path}', which reads the tokens of another tokenizer, {sizes}; name a model that has the actor's tokenizer")
    if shapes.max_position_embeddings < context_tokens:
        raise UserError(
            f"'{key}' is '{path}', which reads at most {shapes.max_position_embeddings} tokens, and a sample may have {context_tokens}; lower "
            "model.max_length, or name a model with a longer context"
        )
    return shapes


def check_reference(path: str, actor: Path, actor_shapes: ModelShapes, context_tokens: int, implemented_by: Implementation = OWN) -> ModelShapes:
    """Returns the shapes of the model ``path`` of ``reference.path``, which is computed as the actor is. Raises ``UserError`` as ``check_value_model``, and
    where it gives no probabilities."""
    shapes = _check_reader(path, "reference.path", actor, actor_shapes, context_tokens, False, implemented_by)
    if not shapes.language_head:
        raise UserError(f"'reference.path' is '{path}', a model with a value head, which gives no probabilities of tokens; name a causal language model")
    check_start_weights(path, found_model(path), shapes)
    return shapes
