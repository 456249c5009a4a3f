"""The shapes of an EAGLE-3 draft head (Li et al., 2025, arXiv 2503.01840), as plain data. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.layout.parameters import Parameter, parameters
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes

EMBEDDING = "embed_tokens.weight"
"""The head's own table, which is never trained."""
FROM_TARGET = "fc.weight"
"""The matrix that combines the target's hidden states."""
PUBLISHED = "draft."
"""Before the names of a head's parameters among published weights."""
MOST_DRAFT_VOCABULARY = 32000
"""The tokens that a new head can propose by default."""
AUX_LAYERS = 3
"""The hidden states of the target that a head reads: a low, a middle and a high one."""


@dataclass(frozen=True, slots=True)
class Eagle3Shapes:
    """The shapes of a head beside a target model.

    ``layer``: its one layer as a Llama model of one layer, with the target's vocabulary; the queries, keys and values of this layer read twice its
    ``hidden_size``. ``target_hidden_size``: of the states that it reads. ``draft_vocab_size``: the tokens that it can propose. ``aux_layers``: the layers of
    the target whose inputs it reads, as vLLM counts them: j is the residual stream before layer j, or the output of layer j - 1. ``own_embedding``: it has a
    table of its own, or reads the target's. ``norm_before_residual``: the residual stream of its layer begins after ``hidden_norm``, not before it."""

    layer: ModelShapes
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    own_embedding: bool = False
    norm_before_residual: bool = False

    @property
    def trained(self) -> ModelShapes:
        """The shapes of the network that training changes: the head's one layer, with all parameters of its folder."""
        return replace(self.layer, own_parameters=tuple((p.name, p.shape) for p in eagle3_parameters(self) if p.name != EMBEDDING))

    def travelling(self, start: int) -> int:
        """Returns how many hidden states of a token go into the pipeline stage of the target that begins with layer ``start``, on their way to the head behind
        the last one: the residual stream, the embedding if the head reads it, and the inputs of the layers before."""
        return 1 + (not self.own_embedding) + sum(layer < start for layer in set(self.aux_layers))

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; it must be from 1 to the {self.layer.vocab_size} tokens of the target")
        if len(self.aux_layers) != AUX_LAYERS or any(layer < 0 for layer in self.aux_layers):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids are {list(self.aux_layers)}; they must be {AUX_LAYERS} layers of the target")


def default_aux_layers(layers: int) -> tuple[int, int, int]:
    """Returns the ``aux_layers`` for a target of ``layers`` layers: vLLM's (2, n / 2, n - 3), and in a model that is too small for three different ones, the
    lowest after the first layer, the middle and the last."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return min(1, max(layers - 3, 0)), layers // 2, layers - 1


def eagle3_shapes(target: ModelShapes, draft_vocab_size: int) -> Eagle3Shapes:
    """Returns the shapes of a new head for ``target``: a layer of the target's sizes, that reads the target's embedding."""
    head_dim, kv_heads = (target.head_dim, target.num_key_value_heads) if target.latent is None else (target.latent.v_head_dim, target.num_attention_heads)
    is_plain = target.latent is None and target.rotary_fraction == 1.0 and target.rope_scaling.kind != "longrope"
    layer = ModelShapes(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=target.intermediate_size,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling if is_plain else RopeScaling(),
    )
    return Eagle3Shapes(layer, target.hidden_size, draft_vocab_size, default_aux_layers(target.num_hidden_layers))


def eagle3_parameters(shapes: Eagle3Shapes) -> Iterator[Parameter]:
    """Yields every parameter of the folder, as SpecForge and vLLM name them; the maps of the vocabulary (``d2t``, ``t2d``) are none."""
    hidden = shapes.layer.hidden_size
    if shapes.own_embedding:
        yield Parameter(EMBEDDING, (shapes.layer.vocab_size, hidden))
    yield Parameter(FROM_TARGET, (hidden, AUX_LAYERS * shapes.target_hidden_size))
    yield Parameter("midlayer.hidden_norm.weight", (hidden,))
    for name, shape in parameters(shapes.layer):
        own = name.removeprefix("model.layers.0.")
        if own == name:
            continue
        is_wide = own in tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
        yield Parameter(f"midlayer.{own}", (shape[0], 2 * hidden) if is_wide else shape)
    yield Parameter("norm.weight", (hidden,))
    yield Parameter("lm_head.weight", (shapes.draft_vocab_size, hidden))


def published_head(shapes: Eagle3Shapes) -> Iterator[Parameter]:
    """Yields what engines receive of a head that is trained beside the policy: all that training changes, under ``PUBLISHED``."""
    return (Parameter(f"{PUBLISHED}{name}", shape) for name, shape in eagle3_parameters(shapes) if name != EMBEDDING)
