"""Reads from a model's folder how it embeds or scores texts. Imports no torch.

Sentence Transformers writes it to ``modules.json`` and a folder for each module; transformers names a class with a score; vLLM reads the keys
``classifier_from_token``, ``is_matryoshka`` and ``matryoshka_dimensions`` of ``config.json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tandem.config.engine import EngineArgs
from tandem.config.pooling import PoolingType
from tandem.model.huggingface.dense_module import DenseModule, read_dense
from tandem.model.huggingface.model_config import TRUNK_CLASS, VALUE_CLASSES, Heads, read_json, value_head_of
from tandem.types import UserError
from tandem.types.input_file import read_json_list

ScoredBy = Literal["sequence", "token", "words"]
MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
"""Modules of Sentence Transformers, in the order in which they are supported."""
_POOLING_MODES: dict[str, PoolingType] = {"lasttoken": "LAST", "mean": "MEAN"}
_LEGACY_MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model makes one result of a text.

    Args:
        scored_by: What scores a text: a head that was trained on whole sequences, one on each token, or the logits of two words. ``None``: the
            model embeds texts.
        pooling_type: Which hidden states of an embedding count.
        use_activation: Whether embeddings are normalized, and scores mapped to 0 to 1, where a request does not say.
        dimensions: The number of components of an embedding where a request does not say; ``None``: all.
        is_matryoshka: Whether requests may ask for fewer. ``matryoshka_dimensions``: how many; empty: any number.
        words: The tokens of no and yes; ``word_ids`` where their ids are given (no ``None``: the logit of yes alone).
        labels: The names of the scores, ``None`` for one that has none.
        is_one_of: Whether one of several labels is right, so that their scores are a distribution (softmax), and not each for itself (sigmoid).
        dense: Layers after the pooling.
        has_template: Whether the folder's chat template is one for pairs of a query and a document.
        is_qwen3_reranker: Whether pairs are written as Qwen3-Reranker reads them.
    """

    scored_by: ScoredBy | None = None
    pooling_type: PoolingType = "LAST"
    use_activation: bool = True
    dimensions: int | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    words: tuple[str, str] | None = None
    word_ids: tuple[int | None, int] | None = None
    labels: tuple[str | None, ...] = (None,)
    is_one_of: bool = False
    dense: tuple[DenseModule, ...] = ()
    has_template: bool = False
    is_qwen3_reranker: bool = False

    @property
    def heads(self) -> Heads:
        """The heads of the model that are loaded."""
        return "none" if self.scored_by is None else "language" if self.scored_by == "words" else "labels"


def read_pooling(folder: Path, args: EngineArgs) -> ModelPooling | None:
    """Returns how an engine with the options ``args`` makes results of the model in ``folder``; ``None`` if it generates text. Raises ``UserError`` for a
    model that cannot do what the options ask for."""
    config = read_json(folder / "config.json") | dict(args.hf_overrides or {})
    # Of a module of transformers, the class in config.json may be named as one without a head: GPT2LMHeadModel.
    if args.runner == "generate" or args.implemented_by.is_transformers:
        return None
    found = _declared(folder, config, args)
    if found is None:
        return None
    given = args.pooler_config
    if given is None:
        return found
    if given.pooling_type == "MEAN" and found.scored_by is not None:
        raise UserError(f"pooler_config pooling_type is 'MEAN' and model '{folder}' scores texts by their last token; leave it out")
    if given.dimensions is not None and found.scored_by is not None:
        raise UserError(f"pooler_config dimensions is {given.dimensions} and model '{folder}' scores texts; leave it out")
    hidden = found.dense[-1].out_features if found.dense else config.get("hidden_size")
    if given.dimensions is not None and isinstance(hidden, int) and given.dimensions > hidden:
        raise UserError(f"pooler_config dimensions is {given.dimensions}; the embeddings of model '{folder}' have {hidden}")
    return replace(
        found, pooling_type=given.pooling_type or found.pooling_type, dimensions=given.dimensions,
        use_activation=found.use_activation if given.use_activation is None else given.use_activation,
    )  # fmt: skip


def _declared(folder: Path, config: Mapping[str, Any], args: EngineArgs) -> ModelPooling | None:
    modules = _modules(folder) if args.convert != "none" else {}
    if args.convert in ("auto", "classify"):
        if (scored := _scored(folder, config, modules)) is not None:
            return scored
        if args.convert == "classify":
            raise UserError(
                f"engine convert is 'classify' and model '{folder}' has no score; name a model for sequence classification, or give classifier_from_token with "
                "hf_overrides"
            )
    if args.convert in ("auto", "embed"):
        if "Pooling" in modules:
            return _matryoshka(_sentence_transformer(folder, modules), config)
        classes = config.get("architectures")
        is_trunk = isinstance(classes, list) and bool(classes) and all(isinstance(name, str) and name.endswith(TRUNK_CLASS) for name in classes)
        if is_trunk or args.convert == "embed" or args.runner == "pooling":
            return _matryoshka(ModelPooling(), config)
    if (scored := _head(config)) is not None:
        return scored
    if args.runner == "pooling":
        raise UserError(f"engine runner is 'pooling' with convert 'none' and model '{folder}' has no score; set convert to embed or classify")
    return None


def _scored(folder: Path, config: Mapping[str, Any], modules: Mapping[str, Path]) -> ModelPooling | None:
    words = config.get("classifier_from_token")
    activates = _activates(config)
    if isinstance(words, list | tuple) and len(words) == 2:
        return ModelPooling(
            "words", words=(str(words[0]), str(words[1])), use_activation=activates, is_qwen3_reranker=bool(config.get("is_original_qwen3_reranker"))
        )
    if "LogitScore" in modules:
        given = read_json(modules["LogitScore"] / "config.json")
        no, yes = given.get("false_token_id"), given.get("true_token_id")
        if not isinstance(yes, int) or not isinstance(no, int | None):
            raise UserError(f"'{modules['LogitScore']}' has no usable true_token_id; download the folder again")
        return ModelPooling("words", word_ids=(no, yes), use_activation=_cross_encoder_activates(folder, activates), has_template=True)
    return _head(config)


def _head(config: Mapping[str, Any]) -> ModelPooling | None:
    classes, labels = config.get("architectures"), config.get("id2label")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    for head, suffix in VALUE_CLASSES.items():
        if any(name.endswith(suffix) for name in names):
            scored_by: ScoredBy = "sequence" if head == "sequence" else "token"
            count = value_head_of(config)[1]
            named = labels if isinstance(labels, dict) else {i: f"LABEL_{i}" for i in range(count)}
            shown = (named.get(str(i), named.get(i)) for i in range(count))
            texts = tuple(label if isinstance(label, str) else None for label in shown)
            return ModelPooling(scored_by, use_activation=_activates(config), labels=texts, is_one_of=count > 1 and _is_one_of(config))
    return None


def _activates(config: Mapping[str, Any]) -> bool:
    """Returns whether scores are mapped to 0 to 1: by the loss that the model was trained with, else as a cross encoder's folder says."""
    kind = config.get("problem_type")
    if kind == "regression":
        return False
    name = _activation_of(config) if kind is None else None
    return True if name is None else _is_sigmoid(name)


def _activation_of(config: Mapping[str, Any]) -> str | None:
    """Returns the name of the activation function that Sentence Transformers wrote for a cross encoder."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else config.get("sbert_ce_default_activation_function")
    return name if isinstance(name, str) else None


def _is_one_of(config: Mapping[str, Any]) -> bool:
    """Returns whether one of several labels is right, as transformers takes it unless the folder says otherwise."""
    return config.get("problem_type") != "multi_label_classification" and _activation_of(config) is None


def _cross_encoder_activates(folder: Path, default: bool) -> bool:
    path = folder / "config_sentence_transformers.json"
    name = read_json(path).get("activation_fn") if path.is_file() else None
    return _is_sigmoid(name) if isinstance(name, str) else default


def _is_sigmoid(name: str) -> bool:
    kind = name.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise UserError(f"the model's activation_fn is {name!r}; supported are torch's Sigmoid and Identity")
    return kind == "Sigmoid"


def _modules(folder: Path) -> dict[str, Path]:
    """Returns the folder of each module of Sentence Transformers by the name of its class; those of several ``Dense`` as ``Dense``, ``Dense 2`` and so on.
    Raises ``UserError`` for modules that are not supported, or in an order that is not."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    found: dict[str, Path] = {}
    order: list[str] = []
    for module in read_json_list(path, "download the folder again", "modules"):
        kind = str(module.get("type", "") if isinstance(module, dict) else module).rpartition(".")[2]
        if kind not in MODULES:
            raise UserError(f"'{path}' has the module {kind!r}; supported are {', '.join(MODULES)}")
        count = order.count(kind)
        order.append(kind)
        found[kind if not count else f"{kind} {count + 1}"] = folder / str(module.get("path", ""))
    if order != sorted(order, key=MODULES.index) or any(order.count(kind) > 1 for kind in order if kind != "Dense"):
        raise UserError(f"'{path}' has the modules {', '.join(order)}; supported are {', '.join(MODULES)} in this order, and of Dense alone several")
    return found


def _sentence_transformer(folder: Path, modules: Mapping[str, Path]) -> ModelPooling:
    given = read_json(modules["Pooling"] / "config.json")
    mode = given.get("pooling_mode")
    if mode is None:
        chosen = [name for name in _LEGACY_MODES if given.get(f"pooling_mode_{name}")]
        mode = chosen[0].removesuffix("_tokens").removesuffix("_token") if len(chosen) == 1 else " and ".join(chosen) or "mean"
    if mode not in _POOLING_MODES:
        raise UserError(f"'{modules['Pooling'] / 'config.json'}' has the pooling mode {mode!r}; supported are {', '.join(_POOLING_MODES)}")
    dense = tuple(read_dense(path) for name, path in modules.items() if name.partition(" ")[0] == "Dense")
    return ModelPooling(pooling_type=_POOLING_MODES[mode], use_activation="Normalize" in modules, dense=dense)


def _matryoshka(pooling: ModelPooling, config: Mapping[str, Any]) -> ModelPooling:
    listed = config.get("matryoshka_dimensions")
    dimensions = tuple(each for each in listed if isinstance(each, int)) if isinstance(listed, list | tuple) else ()
    return replace(pooling, is_matryoshka=bool(config.get("is_matryoshka")) or bool(dimensions), matryoshka_dimensions=dimensions)
