"""What the type of a model says beside its sizes, for types that Tandem does not train. Imports no torch.

Each is that of the class of the type in transformers, to whose models tests compare the number of parameters. A type that is not listed has no biases,
a gated MLP and a norm before attention and before the MLP, which changes less than a hundredth of the parameters.
"""

from dataclasses import dataclass

from tandem.model.family import ConfigFlag, Trait

BIASED, MLP_BIASED = ConfigFlag("attention_bias"), ConfigFlag("mlp_bias")


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """``attention_bias``, ``output_bias``, ``mlp_bias``, ``qk_norm``: as in ``tandem.model.family.Family``. ``gated_mlp``, ``post_norms``: as in
    ``ModelShapes``. ``ties``: embedding and head are one matrix where ``config.json`` does not say. ``head_dim``: where it has none (0: hidden size over
    heads)."""

    attention_bias: Trait = BIASED
    output_bias: Trait = BIASED
    mlp_bias: Trait = MLP_BIASED
    qk_norm: Trait = False
    gated_mlp: bool = True
    post_norms: bool = False
    ties: bool = False
    head_dim: int = 0


OTHER = FamilyTraits()
TWO_MATRICES = FamilyTraits(gated_mlp=False)
TRAITS = {
    "kimi_k2": FamilyTraits(mlp_bias=False),
    "gpt2": FamilyTraits(gated_mlp=False, ties=True),
    "gpt_bigcode": FamilyTraits(gated_mlp=False, ties=True),
    "opt": FamilyTraits(gated_mlp=False, ties=True),
    "bloom": FamilyTraits(gated_mlp=False, ties=True),
    "falcon": FamilyTraits(gated_mlp=False, ties=True),
    "mpt": FamilyTraits(gated_mlp=False, ties=True),
    "starcoder2": FamilyTraits(gated_mlp=False, ties=True),
    **dict.fromkeys(("gpt_neox", "gptj", "phi", "nemotron"), TWO_MATRICES),
}
