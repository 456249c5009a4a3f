"""Trains a tiny model, then generates with one process and with two tensor-parallel ranks, and compares their tokens."""

import sys
from pathlib import Path

import torch

from tandem import LLM, SamplingParams
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.head_outputs import HeadOutputs
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.text.characters import make_character_tokenizer
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.step import LossShare, train_step
from tandem.types import TrainSequence

torch.set_num_threads(1)
folder = Path(sys.argv[1])
shapes = ModelShapes(
    architecture="qwen3", vocab_size=13, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
make_character_tokenizer("0123456789", folder / "tokenizer")
sequence = TrainSequence("a", (1, 2, 3, 4), 1, (0.0, 1.0, 1.0, 1.0))


def mean_loss(outputs: HeadOutputs, batch: MicroBatch) -> LossShare:
    loss = -outputs.logprobs.scaled.mean()
    return LossShare(loss, {"loss": loss.detach()}, {})


def trained(kernels: str, count: int) -> tuple[Decoder, bool]:
    """A model after 30 steps with ``count`` times the sequence, which CPU kernels compute once, and whether it has learned."""
    model = Decoder(shapes, select(kernels))
    initialise(model, 0)
    optimizer = AdamW(model.named_parameters(), TrainerConfig())
    losses = [train_step(model, optimizer, [collate([sequence] * count, finds_beginnings=True)], mean_loss, 0.03).metrics["loss"] for _ in range(30)]
    return model, losses[-1] < 0.5 * losses[0]


model, learned = trained("reference", 1)
_, learned_from_equal_sequences = trained("cpu", 4)
save_model(model, folder / "model", folder / "tokenizer")
answers = []
for ranks in (1, 2):
    llm = LLM(folder / "model", kernels="reference", max_num_seqs=2, tensor_parallel_size=ranks)
    answers.append(llm.generate([{"prompt_token_ids": [1]}], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))[0].outputs[0].token_ids)
    llm.close()
print(learned, learned_from_equal_sequences, answers[0] == answers[1], list(answers[0]), "torch._dynamo" in sys.modules)
