"""Folders of models with heads that read hidden states, made of random weights, and what their equations say, over the layers of transformers."""

import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.kernels import select
from tandem.layout.eagle3 import eagle3_shapes
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors, initialise_eagle3, save_eagle3
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import read_tensors

LAYERS = 2
"""Of the models of ``conftest``."""
AT = f"model.layers.{LAYERS}."
DEEPSEEK = (AT, f"{AT}enorm", f"{AT}hnorm", f"{AT}eh_proj", f"{AT}shared_head.norm")
QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
"""What the names of a predictor's layer begin with, and its other modules as they are published: norms of the embedding and the state, projection, norm."""


def is_from_one(folder: Path) -> bool:
    """Returns whether the model is a Qwen3-Next, whose norms multiply with 1 plus their weights and whose predictor has names of its own."""
    return bool(json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_next")


def with_predictor(folder: Path, other: Path, into: Path, *, seed: int = 5, is_exact: bool = False) -> Path:
    """Writes the model of ``folder`` to ``into`` with a layer of multi-token prediction, the last layer of the model in ``other``. ``is_exact``: the layers
    of both add nothing to the residual stream, so that the head predicts what the model does."""
    shutil.copytree(folder, into)
    tensors = dict(read_tensors(folder))
    hidden = tensors["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)
    from_one, last = is_from_one(folder), f"model.layers.{LAYERS - 1}."
    at, *norms_before, fc, norm_after = QWEN if from_one else DEEPSEEK
    layer = {at + name.removeprefix(last): tensor for name, tensor in read_tensors(other) if name.startswith(last)}
    projection = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1) if is_exact else drawn(hidden, 2 * hidden) * 0.3
    norms = {name: torch.ones(hidden) if is_exact else 1 + 0.2 * drawn(hidden) for name in (*norms_before, norm_after)}
    layer |= {f"{name}.weight": norm - float(from_one) for name, norm in norms.items()} | {f"{fc}.weight": projection}
    if not from_one:
        layer |= {f"{at}embed_tokens.weight": tensors["model.embed_tokens.weight"], f"{at}shared_head.head.weight": tensors["lm_head.weight"]}
    whole = tensors | layer
    if is_exact:
        whole = {name: _silent(name, tensor) for name, tensor in whole.items()}
    (into / "model.safetensors").unlink()
    save_file({name: tensor.contiguous().clone() for name, tensor in whole.items()}, into / "model.safetensors")
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config if from_one else {**config, "num_nextn_predict_layers": 1}))
    (into / "manifest.json").unlink()
    return into


def _silent(name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if "o_proj." in name or "down_proj." in name else tensor


class PublishedPredictor:
    """Multi-token prediction by the equations of DeepSeek-V3, section 2.2, over the layers of transformers; Qwen3-Next has the same with other names, as in
    vLLM's ``Qwen3NextMultiTokenPredictor``."""

    def __init__(self, folder: Path, model: Path, other: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        self.of_layer = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32, attn_implementation="eager").eval().model
        tensors, self.from_one = load_file(folder / "model.safetensors"), is_from_one(folder)
        names = (QWEN if self.from_one else DEEPSEEK)[1:]
        self.enorm, self.hnorm, self.projection, self.norm = (tensors[f"{name}.weight"] for name in names)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return (weight + float(self.from_one)) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)

    @torch.no_grad()
    def draft(self, known: list[int], count: int) -> list[int]:
        states = self.model.model(torch.tensor([known[:-1]])).last_hidden_state
        tokens, drafts = known[1:], list[int]()
        for _ in range(count):
            embedded = F.embedding(torch.tensor([tokens]), self.model.model.embed_tokens.weight)
            x = torch.cat((self.normed(embedded, self.enorm), self.normed(states, self.hnorm)), dim=-1) @ self.projection.T
            length = x.shape[1]
            positions, mask = torch.arange(length)[None], torch.full((length, length), float("-inf")).triu(1)[None, None]
            x = self.of_layer.layers[-1](x, attention_mask=mask, position_embeddings=self.of_layer.rotary_emb(x, positions), position_ids=positions)
            x = x[0] if isinstance(x, tuple) else x
            drafts.append(int(self.model.lm_head(self.normed(x[:, -1], self.norm)).argmax()))
            tokens, states = [*tokens, drafts[-1]], torch.cat((states, x[:, -1:]), dim=1)
        return drafts


def eagle3_head(model: Path, into: Path, draft_vocab_size: int = 30, seed: int = 3) -> Path:
    """Writes a head of random weights for the model of ``model`` to ``into``."""
    shapes = eagle3_shapes(read_shapes(model), draft_vocab_size)
    head = Eagle3Head(shapes, select("reference"))
    initialise_eagle3(head, seed, 0.2)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in eagle3_tensors(head).items():
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2, generator=generator)
    head.target_ids = torch.randperm(shapes.layer.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    save_eagle3(head, into)
    return into


class PublishedEagle3:
    """The head of EAGLE-3 in plain torch, with the arithmetic of vLLM's ``LlamaForCausalLMEagle3``."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
        self.w, self.config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        self.target_ids = torch.arange(self.config["draft_vocab_size"]) + self.w["d2t"]

    def normed(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def layer(self, tokens: list[int], hidden: Tensor) -> Tensor:
        embedded = self.normed(F.embedding(torch.tensor(tokens), self.model.get_input_embeddings().weight), "midlayer.input_layernorm")
        x, length, size = torch.cat((embedded, self.normed(hidden, "midlayer.hidden_norm")), dim=1), len(tokens), self.config["head_dim"]
        q, k, v = ((x @ self.w[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, size).transpose(0, 1) for name in "qkv")
        angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        cos, sin = torch.cat((angle, angle), 1).cos(), torch.cat((angle, angle), 1).sin()
        rotated = lambda y: y * cos + torch.cat((-y[..., size // 2 :], y[..., : size // 2]), -1) * sin
        q, k, v = rotated(q), rotated(k).repeat_interleave(len(q) // len(k), 0), v.repeat_interleave(len(q) // len(k), 0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        x = hidden + (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ self.w["midlayer.self_attn.o_proj.weight"].T
        inner = self.normed(x, "midlayer.post_attention_layernorm")
        gate, up = (inner @ self.w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T

    @torch.no_grad()
    def draft(self, known: list[int], count: int) -> list[int]:
        # The hidden state j of transformers is the input of layer j.
        states = self.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer][0] for layer in self.config["eagle_aux_hidden_state_layer_ids"]], dim=1) @ self.w["fc.weight"].T
        tokens, drafts = known[1:], list[int]()
        for _ in range(count):
            last = self.layer(tokens, hidden)[-1:]
            drafts.append(int(self.target_ids[(self.normed(last, "norm") @ self.w["lm_head.weight"].T).argmax()]))
            tokens, hidden = [*tokens, drafts[-1]], torch.cat((hidden, last))
        return drafts
