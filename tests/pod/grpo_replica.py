"""A GRPO step in transformers and torch alone, written from the papers, on samples and scores that a run recorded.

Advantages, ratio and KL: Shao et al., 2024, "DeepSeekMath", section 4.1. Clip: Schulman et al., 2017, "PPO", equation 7. Mean over the
tokens of the batch: Yu et al., 2025, "DAPO", equation 8. Gradient clipping: Pascanu et al., 2013. AdamW: Loshchilov and Hutter, 2019,
algorithm 2.
"""

import copy
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tandem.types import Sample, Score


@dataclass(frozen=True)
class Settings:
    """The settings of the recipe. ``epochs``: optimizer updates on each batch."""

    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    kl_coef: float
    epochs: int
    epsilon: float
    clip: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.999
    advantage_epsilon: float = 1e-6


class NormInFloat64(Qwen3RMSNorm):
    """The norm without the rounding to fp32 in transformers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


class GrpoReplica:
    """The model of ``folder`` in ``dtype``, AdamW's moments, and the frozen initial model."""

    def __init__(self, folder: Path, dtype: torch.dtype, settings: Settings) -> None:
        self.dtype, self.settings, self.updates = dtype, settings, 0
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        # A policy may draw the padding token, which then has a gradient like any other.
        self.model.get_input_embeddings().padding_idx = None
        if dtype is torch.float64:
            for module in self.model.modules():
                if type(module) is Qwen3RMSNorm:
                    module.__class__ = NormInFloat64
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.first = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        self.second = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}

    def step(self, step: int, samples: Sequence[Sample], scores: Sequence[Score]) -> dict[str, float]:
        """Trains on the batch of ``step``; returns the metrics of its row, each the mean over the updates."""
        s = self.settings
        reward = {score.sample_id: score.value for score in scores}
        assert all(value is not None for value in reward.values()), "the replica does not support masked samples"
        advantages = self._advantages(samples, {name: float(value) for name, value in reward.items() if value is not None})
        ids, mask = self._padded(samples)
        old = self._per_token(samples, [sample.logprobs for sample in samples])
        advantage = self._per_token(samples, [[advantages[sample.id]] * len(sample.token_ids) for sample in samples])
        with torch.no_grad():
            reference = self._logprobs(self.reference, ids)[0]
        rate = s.learning_rate * min(1.0, (step + 1) / s.warmup_steps)
        rows = []
        for _ in range(s.epochs):
            new, entropy = self._logprobs(self.model, ids)
            ratio = (new - old).exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(1 - s.clip, 1 + s.clip) * advantage)
            kl = (reference - new).exp() - (reference - new) - 1
            mean = lambda values: values[mask].sum() / mask.sum()
            (mean(-objective) + s.kl_coef * mean(kl)).backward()
            bound = ratio.clamp(1 - s.clip, 1 + s.clip) * advantage < ratio * advantage
            rows.append({
                "actor/pg_loss": mean(-objective).item(), "kl": mean(kl).item(), "actor/entropy": mean(entropy).item(),
                "actor/ppo_kl": mean(old - new).item(), "actor/pg_clipfrac": mean(bound.to(self.dtype)).item(),
                "actor/grad_norm": self._update(rate),
            })  # fmt: skip
        metrics = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        return metrics | {"actor/lr": rate, "reward/mean": statistics.fmean(value for value in reward.values() if value is not None)}

    def _advantages(self, samples: Sequence[Sample], reward: dict[str, float]) -> dict[str, float]:
        groups = defaultdict(list)
        for sample in samples:
            groups[sample.prompt_id].append(sample.id)
        found = {}
        for members in groups.values():
            values = [reward[name] for name in members]
            mean, deviation = statistics.mean(values), statistics.stdev(values)
            for name in members:
                found[name] = (reward[name] - mean) / (deviation + self.settings.advantage_epsilon)
        return found

    def _padded(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Returns token ids [N, T], padded with 0, and a mask [N, T - 1] of the targets in completions."""
        every = [sample.prompt_token_ids + sample.token_ids for sample in samples]
        longest = max(map(len, every))
        ids = torch.tensor([list(tokens) + [0] * (longest - len(tokens)) for tokens in every])
        places = torch.arange(1, longest)[None]
        first = torch.tensor([len(sample.prompt_token_ids) for sample in samples])[:, None]
        end = torch.tensor([len(tokens) for tokens in every])[:, None]
        return ids, (places >= first) & (places < end)

    def _per_token(self, samples: Sequence[Sample], values: Sequence[Sequence[float]]) -> Tensor:
        """Returns the ``values`` of each completion's tokens at the positions of their targets: [N, T - 1], 0 elsewhere."""
        _, mask = self._padded(samples)
        found = torch.zeros(mask.shape, dtype=self.dtype)
        found[mask] = torch.tensor([value for of_sample in values for value in of_sample], dtype=self.dtype)
        return found

    def _logprobs(self, model: Qwen3ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probability of each target and the entropy of its distribution, in nats: [N, T - 1] each."""
        logprobs = model(ids).logits[:, :-1].log_softmax(-1)
        return logprobs.gather(-1, ids[:, 1:, None])[..., 0], -(logprobs.exp() * logprobs).sum(-1).detach()

    @torch.no_grad()
    def _update(self, rate: float) -> float:
        """Takes one AdamW update from the clipped gradients and drops them; returns the global norm before clipping."""
        s = self.settings
        self.updates += 1
        norm = torch.stack([p.grad.square().sum() for p in self.model.parameters()]).sum().sqrt().item()
        for name, p in self.model.named_parameters():
            gradient = p.grad * min(1.0, s.max_grad_norm / norm)
            self.first[name].mul_(s.beta1).add_(gradient, alpha=1 - s.beta1)
            self.second[name].mul_(s.beta2).addcmul_(gradient, gradient, value=1 - s.beta2)
            if p.ndim >= 2:
                p.mul_(1 - rate * s.weight_decay)
            corrected = self.first[name] / (1 - s.beta1**self.updates)
            p.sub_(rate * corrected / ((self.second[name] / (1 - s.beta2**self.updates)).sqrt() + s.epsilon))
            p.grad = None
        return norm
