"""OLMo 3 (Ai2, 2025): OLMo 2 with windows in three of four layers, whose rotary frequencies are not scaled where those of the others are."""

from dataclasses import replace

from tandem.model.families import olmo2
from tandem.model.sliding_windows import windows_by_type

FAMILY = replace(
    olmo2.FAMILY,
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    rotary_by_window=True,
    mask=windows_by_type(default=4096, full_every=4),
    rope_theta=5e5,
)
