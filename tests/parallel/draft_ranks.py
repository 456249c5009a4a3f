"""Trains a seeded draft head beside a seeded target, in one process or as a rank of any mesh, and computes its loss with plain torch by drafting anew."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from data_parallel_training import record_gradients
from model_ranks import LEARNING_RATE, Case, ranks_of, sequences_of, weights_of
from policy_ranks import Policy, scored_samples
from ranks import RankContext
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parallel import ParallelConfig
from tandem.kernels import select
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.schedules import ScheduleName
from tandem.model.decoder import Decoder
from tandem.model.draft_decoder import DraftDecoder
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors, initialise_eagle3, load_eagle3, save_eagle3
from tandem.model.huggingface.model_folder import load_tensors, save_model
from tandem.rl.algorithms.batch import make_batch, train_sequence
from tandem.rl.algorithms.draft import update_draft
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.build import ReplicaSettings, build_draft, build_replica
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.draft import DECAY, make_draft_loss, with_acceptance
from tandem.trainer.micro_batch import make_micro_batches
from tandem.trainer.packing import pack_shares
from tandem.trainer.parallel.replica import Replica
from tandem.trainer.step import train_step
from tandem.types import TrainSequence

STEPS = 3
"""Positions of a draft."""
MICRO_BATCH_TOKENS = 30


@dataclass(frozen=True)
class Draft:
    """``case``: the target and how ranks divide it. ``schedule``: (name, virtual stages) of its pipeline. ``own_embedding``: of the head."""

    case: Case
    schedule: tuple[ScheduleName, int] = ("1f1b", 1)
    own_embedding: bool = False


def write_folders(draft: Draft, folder: Path) -> None:
    """Writes the target and a head that can propose 29 of its tokens, with no special values, to ``folder``."""
    target = Decoder(draft.case.shapes, ReferenceKernels())
    load_tensors(target, weights_of(draft.case.shapes).items())
    save_model(target, folder / "target")
    shapes = replace(eagle3_shapes(draft.case.shapes, 29), own_embedding=draft.own_embedding)
    head, generator = Eagle3Head(shapes, ReferenceKernels()), torch.Generator().manual_seed(7)
    initialise_eagle3(head, 1, 0.2)
    with torch.no_grad():
        for name, tensor in eagle3_tensors(head).items():
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2, generator=generator)
    head.target_ids = torch.randperm(draft.case.shapes.vocab_size, generator=generator)[:29].sort().values
    save_eagle3(head, folder / "head")


def settings_of(draft: Draft, here: RankContext | None, folder: Path) -> ReplicaSettings:
    shape, (order, virtual) = None if here is None else here.mesh.shape, draft.schedule
    parallel = ParallelConfig(schedule=order, virtual_stages=virtual, zero=draft.case.zero)
    if shape is not None:
        parallel = replace(parallel, data=shape.data, tensor=shape.tensor, pipeline=shape.pipeline, expert=shape.expert)
    trainer = replace(draft.case.trainer, micro_batch_tokens=MICRO_BATCH_TOKENS)
    return ReplicaSettings(folder / "target", folder, trainer, parallel, MICRO_BATCH_TOKENS, context=128)


def replica_of(draft: Draft, here: RankContext | None, folder: Path) -> Replica:
    """Returns the head beside a target that stays as it is."""
    settings = replace(settings_of(draft, here, folder), draft=(folder / "head", STEPS))
    return build_replica(settings, ranks_of(here, draft.case), select(draft.case.kernels, getattr(torch, draft.case.dtype)))


def train_draft(here: RankContext | None, draft: Draft, folder: Path) -> dict[str, Any]:
    """Trains the head on this rank, or in one process. Returns the ``metrics`` of every step; ``gradients`` of the first one before clipping and the
    ``parameters`` of the head by name, on ranks that have it."""
    torch.set_num_threads(1)
    replica = replica_of(draft, here, folder)
    gradients = first_gradients(replica)
    metrics = [_step(draft, replica) for _ in range(draft.case.steps)]
    return {"metrics": metrics, "gradients": named(replica, gradients), "parameters": parameters_of(replica)}


def _step(draft: Draft, replica: Replica) -> dict[str, float]:
    sequences = sequences_of(draft.case)
    shares = pack_shares(sequences, replica.ranks.data.size, MICRO_BATCH_TOKENS)
    own = shares[replica.ranks.data.rank]
    micro_batches = make_micro_batches(sequences, own, replica.passes(len(own), max(map(len, shares))), replica.model.dtype, replica.model.device)
    result = train_step(
        replica.model, replica.optimizer, micro_batches, make_draft_loss(counts_of(sequences), "train/loss"), LEARNING_RATE, sums=replica.sums,
        forward_backward=replica.forward_backward,
    )  # fmt: skip
    return with_acceptance(result.metrics)


def first_gradients(replica: Replica) -> dict[str, Tensor]:
    """Returns a mapping that is filled with the gradients by name before the first clipping."""
    if replica.sums is not None:
        return record_gradients(replica.sums)
    made: dict[str, Tensor] = {}
    clip = replica.optimizer.clip

    def keep(scale: float = 1.0) -> float:
        if not made:
            made.update({name: p.grad.clone() for name, p in replica.model.named_parameters() if p.grad is not None})
        return clip(scale)

    replica.optimizer.clip = keep  # type: ignore[method-assign]
    return made


def named(replica: Replica, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``gradients`` by name in the head's folder; none on a rank that has no head."""
    model = replica.model
    assert isinstance(model, DraftDecoder)
    if model.head is None:
        assert not gradients
        return {}
    twin = Eagle3Head(model.head_shapes, model.kernels, dtype=model.dtype)
    with torch.no_grad():
        for name, parameter in twin.named_parameters(prefix="head"):
            if name in gradients:
                parameter.copy_(gradients[name])
    return {name: tensor for name, tensor in eagle3_tensors(twin).items() if name in dict(model.shapes.own_parameters)}


def parameters_of(replica: Replica) -> dict[str, Tensor]:
    assert isinstance(replica.model, DraftDecoder)
    with replica.whole():
        return {name: tensor.clone() for name, tensor in replica.model.huggingface_parameters().items()}


def checkpointed(here: RankContext | None, draft: Draft, folder: Path, steps: int, at: int) -> dict[str, Any]:
    """Takes the head's first ``steps`` steps, from the checkpoint of step ``at`` if it is above 0, and writes a checkpoint. Returns as ``train_draft``."""
    torch.set_num_threads(1)
    replica = replica_of(draft, here, folder)
    guard = GradScaler(draft.case.trainer)
    checkpoints = ReplicaCheckpoints(folder / "checkpoints", 9, folder / "target", ReplicaState(replica), guard, replica.ranks.world, asynchronous=False)
    loaded = checkpoints.load(at) if at else None
    assert (0 if loaded is None else loaded.step) == at == replica.optimizer.updates
    metrics = [_step(draft, replica) for _ in range(at, steps)]
    checkpoints.save(steps, {})
    checkpoints.wait()
    checkpoints.close()
    return {"metrics": metrics, "parameters": parameters_of(replica)}


def follow_policy(here: RankContext | None, draft: Draft, folder: Path) -> dict[str, Any]:
    """Moves the target by GRPO and, after each update, the head beside it. Returns the ``metrics`` of the head and its ``parameters``, and the ``moved``
    metrics of the policy."""
    torch.set_num_threads(1)
    settings = settings_of(draft, here, folder)
    policy, ranks = Policy(draft.case, AlgorithmConfig()), ranks_of(here, draft.case)
    actor = build_replica(settings, ranks, select(draft.case.kernels, getattr(torch, draft.case.dtype)))
    head = build_draft(actor, folder / "head", STEPS, settings.trainer, 128)
    metrics, moved = list[dict[str, float]](), list[dict[str, float]]()
    for step in range(draft.case.steps):
        samples, scores = scored_samples(policy, step)
        batch = make_batch(step, samples, scores, policy.algorithm, 14, None)
        moved.append(update_policy(actor, batch, policy.algorithm, settings.trainer).metrics)
        with actor.whole():
            metrics.append(update_draft(head, step, [train_sequence(sample) for sample in samples], settings.trainer))
    return {"metrics": metrics, "moved": moved, "parameters": parameters_of(head)}


def by_drafting_anew(draft: Draft, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss of the first step and its gradients by name in the head's folder, in float64: the target by transformers, and the head by the equations
    of EAGLE-3, one draft at a time, each from the target's states up to its token and its own after that."""
    peer = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    head = load_eagle3(folder / "head", ReferenceKernels(), draft.case.shapes, dtype=torch.float64)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in eagle3_tensors(head).items()}
    sequences = sequences_of(draft.case)
    counted, losses = counts_of(sequences).tokens, list[Tensor]()
    table = peer.get_input_embeddings().weight
    for sequence in sequences:
        tokens = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            known = peer(tokens[None], output_hidden_states=True)
        losses += _of_sequence(head, weights, sequence, tokens, [known.hidden_states[layer][0] for layer in head.shapes.aux_layers], known.logits[0], table)
    total = torch.stack(losses).sum() / counted
    total.backward()  # type: ignore[no-untyped-call]
    return total.item(), {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def _of_sequence(
    head: Eagle3Head, weights: dict[str, Tensor], sequence: TrainSequence, tokens: Tensor, states: list[Tensor], logits: Tensor, table: Tensor
) -> list[Tensor]:
    """Returns what each draft of ``sequence`` adds to the loss. The tokens after which a counted one follows are learned, and none is read behind the last."""
    counts = [place for place in range(1, len(tokens)) if sequence.loss_mask[place]]
    length, losses = max(counts), list[Tensor]()
    combined = torch.cat(states, 1) @ weights["fc.weight"].T
    for token in range(length):
        hidden = combined[: token + 1]
        for step in range(STEPS):
            label = token + step + 1
            if label >= length:
                break
            x, following = _head(head, weights, table[tokens[1 : label + 1]].detach(), hidden)
            hidden = torch.cat((hidden, following[-1:]))
            if label + 1 in counts and int(logits[label].argmax()) in head.target_ids.tolist():
                distribution = logits[label, head.target_ids].softmax(0)
                losses.append(-(DECAY**step) * (distribution * (x[-1] @ weights["lm_head.weight"].T).log_softmax(0)).sum())
    return losses


def _head(head: Eagle3Head, weights: dict[str, Tensor], embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (what the logits read, the hidden states of the next step) of one sequence by the equations."""
    layer, length = head.shapes.layer, len(embedded)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    x = torch.cat((norm(embedded, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")), dim=1)
    q, k, v = ((x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, -1, layer.head_dim).transpose(0, 1) for name in "qkv")
    half = layer.head_dim // 2
    # The table of cosines is fp32.
    cos, sin = (table[:length].double() for table in head.rotary_tables[0].split(half, dim=-1))
    turned = lambda y: torch.cat((y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin), -1)
    groups = layer.num_attention_heads // layer.num_key_value_heads
    k, v = turned(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = (turned(q) @ k.transpose(1, 2) / math.sqrt(layer.head_dim)).masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    x = residual = hidden + (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
    x = norm(x, "midlayer.post_attention_layernorm")
    gate, up = (x @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = residual + (torch.nn.functional.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
    return norm(x, "norm"), x
