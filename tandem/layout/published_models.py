"""Shapes of published models by a short name, so that a layout can be planned without their files. Imports no torch."""

from dataclasses import dataclass

from tandem.layout.shapes import ModelShapes


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """``source``: its name on the Hugging Face Hub, whose ``config.json`` has ``shapes``."""

    source: str
    shapes: ModelShapes


def _llama(hidden_size: int, layers: int, heads: int, intermediate_size: int) -> ModelShapes:
    return ModelShapes("llama", 128256, hidden_size, layers, heads, 8, 128, intermediate_size, 131072, False, rms_norm_eps=1e-5, rope_theta=5e5)


def _qwen3(hidden_size: int, layers: int, heads: int, intermediate_size: int, *, ties: bool = False) -> ModelShapes:
    return ModelShapes("qwen3", 151936, hidden_size, layers, heads, 8, 128, intermediate_size, 40960, ties, rope_theta=1e6, qk_norm=True)


PUBLISHED_MODELS = {
    "llama-8b": PublishedModel("meta-llama/Llama-3.1-8B-Instruct", _llama(4096, 32, 32, 14336)),
    "llama-70b": PublishedModel("meta-llama/Llama-3.3-70B-Instruct", _llama(8192, 80, 64, 28672)),
    "llama-405b": PublishedModel("meta-llama/Llama-3.1-405B-Instruct", _llama(16384, 126, 128, 53248)),
    "qwen3-0.6b": PublishedModel("Qwen/Qwen3-0.6B", _qwen3(1024, 28, 16, 3072, ties=True)),
    "qwen3-8b": PublishedModel("Qwen/Qwen3-8B", _qwen3(4096, 36, 32, 12288)),
    "qwen3-32b": PublishedModel("Qwen/Qwen3-32B", _qwen3(5120, 64, 64, 25600)),
}
