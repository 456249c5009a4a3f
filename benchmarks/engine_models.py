"""The models of the engine benchmark: random weights in Hugging Face folders, and the GGUF files of the same weights."""

import subprocess
import sys
from pathlib import Path

from bounds import forward_flops
from machine import HERE

from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise

MODELS = {
    "sort": ModelShapes("qwen3", 32, 128, 5, 4, 2, 32, 512, 8192, tie_word_embeddings=True, qk_norm=True),
    "3.7M": ModelShapes("qwen3", 2048, 256, 4, 4, 2, 64, 768, 8192, tie_word_embeddings=True, qk_norm=True),
    "84M": ModelShapes("qwen3", 11264, 768, 12, 12, 4, 64, 2048, 8192, tie_word_embeddings=True, qk_norm=True),
    "0.5B": ModelShapes(
        "qwen2", 151936, 896, 24, 14, 2, 64, 4864, 8192, tie_word_embeddings=True, rope_theta=1e6, attention_bias=True
    ),
}
"""By name; sort has the shapes of recipes/sort.yaml, 0.5B has the shapes of Qwen2.5-0.5B."""


def folder_of(name: str, work: Path) -> Path:
    """The model's folder in ``work``, made where it is missing."""
    folder = work / f"engine-{name}"
    if not folder.exists():
        print(f"writing {folder}", file=sys.stderr, flush=True)
        decoder = Decoder(MODELS[name], select("reference"))
        # Layers that weigh more than the embedding: a greedy completion is then no echo of the prompt's last token.
        initialise(decoder, seed=0, standard_deviation=0.08)
        decoder.embed_tokens.data.mul_(0.25)
        save_model(decoder, folder)
    return folder


def gguf_of(name: str, kind: str, work: Path, python: str) -> Path:
    """The GGUF file of the same weights, ``kind`` F32 or Q8_0, written by llama.cpp's own package in its environment, or Q4_K_M, which it makes of F32."""
    path = work / f"engine-{name}-{kind}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        script, source = ("quantize_gguf.py", gguf_of(name, "F32", work, python)) if "_K_" in kind else ("write_gguf.py", folder_of(name, work))
        print(f"writing {path}", file=sys.stderr, flush=True)
        subprocess.run([python, str(HERE / "peers" / script), str(source), str(part), kind], check=True)
        part.rename(path)
    return path


def flops(name: str, sequences: int, prompt: int, new: int) -> float:
    """Floating-point operations of the matrix products of one call: the last token of a sequence is never fed again, and outputs are needed for drawn
    tokens only."""
    return sequences * forward_flops(MODELS[name], prompt + new - 1, new)
