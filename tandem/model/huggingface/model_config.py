"""Converts ``config.json`` of a Hugging Face folder to and from ``ModelShapes``. Imports no torch.

What differs between families is declared in ``tandem.model.families``. Missing keys take the defaults of transformers 5's configuration
classes; both key styles of rotary embedding are read (``rope_theta`` and ``rope_scaling`` of transformers 4, ``rope_parameters`` of 5).
Dropout is not applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from tandem.config.implementation import OWN, Implementation
from tandem.layout.shapes import ModelShapes, ValueHead, check_tensor_count
from tandem.model.family import Family, family_named, family_of_config
from tandem.model.huggingface.arithmetic_keys import refuse_other_terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.latent_config import latent_keys
from tandem.model.huggingface.rotary_config import read_rotaries, read_rotary_fraction, rotary_keys
from tandem.model.transformers_module.read import read_module_shapes
from tandem.types import UserError
from tandem.types.input_file import read_json_object

TokenIds = int | Sequence[int] | None
Heads = Literal["language", "any", "labels", "none"]
"""The heads that a model may have: that of a language model; any that gives one number; any, also with several labels; none, so that those of the folder are
left out."""
LANGUAGE_CLASS = "ForCausalLM"
EAGLE3_CLASS = "LlamaForCausalLMEagle3"
"""Of the folder of a draft head, which is read by ``eagle3_config``."""
TRUNK_CLASS = "Model"
VALUE_CLASSES: dict[ValueHead, str] = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
"""The ends of transformers' class names by the head of a model."""
MOST_LABELS = 2**20
ONE_LABEL: dict[str, Any] = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
"""The keys of ``config.json`` for a head that gives one number."""


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in ``path``. Raises ``UserError`` if there is none."""
    if path.parent.is_file():
        raise UserError(f"'{path.parent}' is a file; name the Hugging Face folder with its {path.name}")
    try:
        return read_json_object(path, "download the folder again")
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise UserError(f"'{path.parent}' is not a folder here; name a Hugging Face folder, or OWNER/NAME of a model of the Hub") from None
        raise UserError(f"'{path.parent}' has no {path.name}; it must be a Hugging Face model folder") from None


def read_shapes(folder: str | Path, heads: Heads = "language", implemented_by: Implementation = OWN) -> ModelShapes:
    """Returns the shapes of the model in ``folder``, which has a language-model head, or, with ``any``, may have a value head in its place, with ``labels``
    one of several labels; with ``none`` those of its layers alone. ``implemented_by``: who computes it. Raises ``UserError`` for a folder without a model or
    a model that is not supported."""
    path = Path(folder) / "config.json"
    if implemented_by.is_transformers:
        if heads not in ("language", "any"):
            raise UserError(f"model '{folder}' and model_impl 'transformers': only models that generate text are computed by transformers; leave it out")
        return read_module_shapes(folder, implemented_by.trust_remote_code)
    config = read_json(path)
    if EAGLE3_CLASS in (config.get("architectures") or ()):
        raise UserError(f"'{folder}' is a draft head of EAGLE-3 and no model by itself; give it to its target: speculative_config method 'eagle3'")
    shapes = shapes_of(config, str(path))
    if heads == "none":
        return replace(shapes, language_head=False, value_head="none", num_labels=1, tie_word_embeddings=False)
    if heads != "labels" and shapes.num_labels != 1:
        raise UserError(f"'{path}' has num_labels {shapes.num_labels}; a reward model or a critic gives one number: name a model with num_labels 1")
    if heads == "language" and not shapes.language_head:
        raise UserError(
            f"model '{folder}' is a {class_of(shapes)}, which scores text and has no language-model head; name the folder of a causal language model"
        )
    return shapes


def class_of(shapes: ModelShapes) -> str:
    """Returns the name of transformers' class for ``shapes``."""
    family = family_named(shapes.architecture)
    if shapes.language_head:
        return family.class_name
    start = family.other_classes or family.class_name.removesuffix(LANGUAGE_CLASS)
    return start + (TRUNK_CLASS if shapes.value_head == "none" else VALUE_CLASSES[shapes.value_head])


def value_head_of(config: Mapping[str, Any], where: str = "config.json") -> tuple[ValueHead, int]:
    """Returns the value head that ``architectures`` names, and the number of its labels. Raises ``UserError`` for a number that cannot be."""
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    for head, suffix in VALUE_CLASSES.items():
        if any(name.endswith(suffix) for name in names):
            # transformers writes the labels unless they are the two of its default.
            labels = config.get("id2label")
            count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
            if not isinstance(count, int) or not 1 <= count <= MOST_LABELS:
                raise UserError(f"'{where}' has num_labels {str(count)[:40]}; a head has 1 to {MOST_LABELS} labels")
            return head, count
    return "none", 1


def shapes_of(config: dict[str, Any], where: str = "config.json") -> ModelShapes:
    """Returns the shapes that the content of a ``config.json`` describes; ``where`` names it in errors."""
    read, family = ConfigReader(config, where), family_of_config(config, where)
    _check_activation(read, family)
    heads, hidden, layers = (read.integer(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    try:
        check_tensor_count(layers, 0)
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None
    # Null means the value derived from the heads, a missing key the family's default.
    kv_heads = heads if "num_key_value_heads" in config else family.num_key_value_heads or heads
    head_dim = hidden // heads if "head_dim" in config else family.head_dim or hidden // heads
    head_dim = read.integer("head_dim", head_dim)
    latent = None if family.latent is None else family.latent(read)
    kv_heads = read.integer("num_key_value_heads", kv_heads)
    if latent is not None:
        # transformers writes the rotated part of a head as head_dim, and a number of key-value heads that means nothing.
        kv_heads, head_dim = heads, latent.head_dim
    max_position_embeddings = read.integer("max_position_embeddings", family.max_position_embeddings)
    rotary, window_rotary = read_rotaries(read, max_position_embeddings, family)
    biases, (value_head, labels) = family.biases(read), value_head_of(config, where)
    # Without a language-model head nothing is tied, whatever the model that it was made from says.
    is_tied = read.boolean("tie_word_embeddings", family.tie_word_embeddings) and value_head == "none"
    try:
        shapes = ModelShapes(
            architecture=family.model_type,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=read.integer("intermediate_size"),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=is_tied,
            rms_norm_eps=read.number(family.norm_eps_key, family.rms_norm_eps),
            rope_theta=rotary.theta,
            rope_scaling=rotary.scaling,
            rotary_fraction=read_rotary_fraction(read, family),
            window_rotary=None if window_rotary == rotary else window_rotary,
            attention_bias=biases.attention,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            **(family.constants | ({} if family.terms is None else family.terms.read(read, layers, head_dim))),
            layer_windows=family.mask.read(read, layers),
            experts=None if family.experts is None else family.experts.read(read, layers),
            value_head=value_head,
            num_labels=labels,
            language_head=value_head == "none",
            latent=latent,
        )
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None
    refuse_other_terms(read, family.model_type, _keys_of_family(shapes) | ({} if latent is None else latent_keys(latent)))
    return shapes


def _check_activation(read: ConfigReader, family: Family) -> None:
    """Raises ``UserError`` for another activation than that of ``family``, in either key."""
    for key in ("hidden_act", "hidden_activation"):
        value = read.config.get(key)
        aliases = (family.activation, family.activation_alias) if key == family.activation_key else (family.activation,)
        if value is not None and value not in aliases:
            raise read.fail(key, value, f"only {family.activation!r} is supported for {family.model_type}")


def _keys_of_family(shapes: ModelShapes) -> dict[str, Any]:
    """Returns the keys by which the ``config.json`` of a family says what others do not have."""
    family = family_named(shapes.architecture)
    content: dict[str, Any] = {family.activation_key: family.activation} | family.bias_keys(shapes) | family.mask.write(_all_windows(shapes))
    if family.experts is not None and shapes.experts is not None:
        content |= family.experts.write(shapes.experts)
    return content if family.terms is None else content | family.terms.write(shapes)


def config_json(
    shapes: ModelShapes,
    *,
    eos_token_id: TokenIds = None,
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """Returns the content of a ``config.json`` that transformers 4 and 5 read. Raises ``ValueError`` for shapes that the keys of
    their family cannot express."""
    family = family_named(shapes.architecture)
    content: dict[str, Any] = {
        "architectures": [class_of(shapes)],
        "model_type": family.model_type,
        "vocab_size": shapes.vocab_size,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "num_hidden_layers": shapes.num_hidden_layers,
        "num_attention_heads": shapes.num_attention_heads,
        "num_key_value_heads": shapes.num_key_value_heads,
        "head_dim": shapes.head_dim,
        family.activation_key: family.activation,
        "max_position_embeddings": shapes.max_position_embeddings,
        family.norm_eps_key: shapes.rms_norm_eps,
        "tie_word_embeddings": shapes.tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **rotary_keys(shapes, family),
        "eos_token_id": eos_token_id if eos_token_id is None or isinstance(eos_token_id, int) else list(eos_token_id),
        "bos_token_id": bos_token_id,
        "pad_token_id": pad_token_id,
    }
    if shapes.value_head != "none":
        content |= ONE_LABEL
    content |= _keys_of_family(shapes)
    if shapes.latent is not None:
        content |= latent_keys(shapes.latent)
    _check_expressed(shapes, content)
    return content


def _all_windows(shapes: ModelShapes) -> tuple[int | None, ...]:
    return tuple(shapes.window(layer) for layer in range(shapes.num_hidden_layers))


def _check_expressed(shapes: ModelShapes, content: dict[str, Any]) -> None:
    """Raises ``ValueError`` if ``content`` does not read back as ``shapes``."""
    wanted, read = ({**asdict(each), "layer_windows": _all_windows(each)} for each in (shapes, shapes_of(content)))
    for name, given in wanted.items():
        if given != read[name]:
            if isinstance(given, dict) and isinstance(read[name], dict):
                name, given, expressible = next((f"{name}.{key}", given[key], read[name][key]) for key in given if given[key] != read[name][key])
            else:
                expressible = read[name]
            raise ValueError(f"the config.json of a {shapes.architecture} model cannot express {name} {given}; it must be {expressible}")
