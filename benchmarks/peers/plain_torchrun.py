"""What a user of plain PyTorch writes: a small decoder, data-parallel over gloo, AdamW. ``torchrun --nproc_per_node 2 plain_torchrun.py MARK`` takes one step
and writes the file MARK. The model has the shapes of ``tests/cluster/tiny.yaml``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, SEQUENCES = 128, 16, 2, 32, 16, 2


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layer(self.embed(tokens), src_mask=mask, is_causal=True))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{loss.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
