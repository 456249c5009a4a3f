"""What a model's folder and its cache rule out, before its weights are read. Imports no torch, as the controller of a pod and a server check with it."""

from pathlib import Path

from tandem.config.engine import EngineArgs
from tandem.layout.quantizable import cache_cannot
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.pooling_config import read_pooling
from tandem.model.huggingface.weight_files import check_weights
from tandem.model.quantization.formats import read_format
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype


def check_kv_cache_dtype(shapes: ModelShapes, kv_cache_dtype: KVCacheDtype, name: str = "kv_cache_dtype") -> None:
    """Raises ``UserError`` for a ``kv_cache_dtype`` that the cache of a model of ``shapes`` cannot have. ``name``: of the option."""
    if (reason := cache_cannot(shapes, kv_cache_dtype)) is not None:
        raise UserError(f"{name} is '{kv_cache_dtype}', {reason}")


def check_vocabulary(tokenizer: Tokenizer, folder: str | Path, shapes: ModelShapes) -> None:
    """Raises ``UserError`` for a ``tokenizer`` with more tokens than the model in ``folder``, of ``shapes``."""
    if tokenizer.vocab_size > shapes.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens and '{folder}' {shapes.vocab_size}; they do not belong together")


def check_folder(args: EngineArgs, tokenizer: Tokenizer) -> None:
    """Raises ``UserError`` for the folder of a model that an engine with ``args`` cannot have. A module of transformers is described where it is loaded."""
    if args.implemented_by.is_transformers:
        return
    folder = Path(args.model)
    pooling = read_pooling(folder, args)
    shapes = read_shapes(folder, "language" if pooling is None else pooling.heads)
    check_vocabulary(tokenizer, folder, shapes)
    read_format(folder)
    if args.load_format == "auto":
        check_weights(folder, shapes)
