"""Generates the table of ``docs/models.md`` from the declarations of the families: ``python -m tandem.model.families_document docs/models.md``."""

import importlib
import sys
from pathlib import Path

from tandem.model import families
from tandem.model.family import ConfigFlag, Family, Trait, all_families

BEGIN, END = "<!-- families: python -m tandem.model.families_document docs/models.md -->", "<!-- end of families -->"


def table() -> str:
    """Returns the Markdown table of all families."""
    rows = ["| `model_type` | class of transformers | family | what its declaration turns on |", "| --- | --- | --- | --- |"]
    for name, family in all_families().items():
        text = (importlib.import_module(f"{families.__name__}.{name}").__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "`")
        rows.append(f"| `{name}` | `{family.class_name}` | {text} | {', '.join(_traits(family)) or 'nothing'} |")
    return "\n".join(rows)


def with_table(document: str) -> str:
    """Returns ``document`` with the table between its marks. Raises ``ValueError`` if it has none."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document has no '{BEGIN}' with '{END}' behind it")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _traits(family: Family) -> list[str]:
    biases = {"q, k and v": family.attention_bias, "o": family.output_bias, "MLP": family.mlp_bias}
    terms = {
        "a norm of each head's queries and keys": family.qk_norm and not family.qk_norm_all_heads,
        "a norm of all heads' queries and keys": family.qk_norm_all_heads,
        "norms after attention and MLP": family.post_norms,
        "none before them": not family.pre_norms,
        "LayerNorm without biases": family.centred_norms,
        "attention and MLP side by side": family.parallel_blocks,
        "a rotary embedding of a part of each head": family.rotary_fraction is not None,
        "neighbouring components rotated together": family.rotary_interleaved,
        "latent attention": family.latent is not None,
        "GELU": family.activation == "gelu_pytorch_tanh",
        "norms that multiply with 1 plus their weights": family.norms_from_one,
        "a scaled embedding": family.scaled_embedding,
        "sliding windows": bool(family.mask.write((1,))),
        "terms of its own in `config.json`": family.terms is not None,
        "stacked matrices in the folder": bool(family.stacked) or (family.experts is not None and family.experts.stacked),
        "a mixture of experts": family.experts is not None,
    }
    return [f"biases of {what}{_switch(trait)}" for what, trait in biases.items() if trait is not False] + [name for name, is_on in terms.items() if is_on]


def _switch(trait: Trait) -> str:
    return f" (`{trait.name}`)" if isinstance(trait, ConfigFlag) else ""


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
