"""What a rank of DeepSpeed holds of checkpoints and of the weights sent to engines, under Hugging Face's names.

The files are those of every trainer: a run may be continued on another number of ranks, with another stage, or by Tandem's own trainer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.backends.deepspeed.replica import DeepSpeedReplica
from tandem.layout.parameters import trained_parameters
from tandem.model.huggingface.model_folder import to_huggingface
from tandem.trainer.checkpoint.codes import Part
from tandem.trainer.checkpoint.format.shard import Shard
from tandem.trainer.checkpoint.model_state import run_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.offload.pages import WEIGHTS
from tandem.trainer.parallel.zero import Part as Run
from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class DeepSpeedState:
    """The shards of ``replica``. ``parts``: where the decoder's parameters hold the tensors of the whole model, found while they had memory."""

    replica: DeepSpeedReplica
    parts: Sequence[Part]

    @property
    def folder(self) -> Path | None:
        """Returns ``None``: all is in memory."""
        return None

    def shards(self) -> list[Shard]:
        """Returns weights and moments as live views of the flat tensors that this rank updates."""
        return [shard for run in self.replica.optimizer.parts() for shard in self._of_run(run)]

    def load(self, contents: Contents, updates: int) -> None:
        """Loads weights and moments. Raises ``UserError`` for a checkpoint of another model or optimizer; nothing is changed then."""
        optimizer = self.replica.optimizer
        names = {name for name, _ in trained_parameters(self.replica.model.shapes)}
        strange = [key for key in contents.stored if key.name not in names or key.state not in (WEIGHTS, *optimizer.kinds)]
        if strange:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: it has '{strange[0]}'")
        runs = [run for run in optimizer.parts(form=True) if run.kind == WEIGHTS or updates]
        try:
            contents.check([shard for run in runs for shard in self._of_run(run)])
        except UserError as error:
            raise UserError(f"checkpoint '{contents.folder}' is of another model or optimizer: {error}") from None
        read = [run._replace(values=torch.empty_like(run.values, device="cpu")) for run in runs]
        contents.read([shard for run in read for shard in self._of_run(run)])
        optimizer.load_parts(read, updates)

    def weight_shards(self) -> list[WeightShard]:
        """Returns this rank's shards of the weights: whole tensors under ZeRO 1 and 2, of which ranks divide the publishing; under ZeRO 3 the rank's own run
        of each, so that nothing is gathered."""
        model, optimizer = self.replica.model, self.replica.optimizer
        if optimizer.stage == 3:
            runs = [run for run in optimizer.parts(form=True) if run.kind == WEIGHTS]
            return [self._weight_shard(run, shard) for run in runs for shard in self._of_run(run)]
        return [
            WeightShard(p.name, p.whole, p.offsets, model.dtype, partial(_view, model.get_parameter(p.parameter), p.first, p)) for p in self.parts
        ]

    def whole(self) -> Iterable[tuple[str, Tensor]] | None:
        """Returns every tensor by its Hugging Face name, as live views; ``None`` under ZeRO 3, where a rank has a part of each."""
        return None if self.replica.optimizer.stage == 3 else to_huggingface(self.replica.model)

    def _of_run(self, run: Run) -> list[Shard]:
        return run_shards(list(self.parts), run.kind, run.name, run.first, run.values)

    def _weight_shard(self, run: Run, shard: Shard) -> WeightShard:
        # The shard is a view of the run's placeholder, so its offset in the placeholder is its offset in the run.
        first = int(shard.tensor.storage_offset() - run.values.storage_offset())
        weight = partial(self.replica.optimizer.weight, run.name)
        return WeightShard(shard.key.name, shard.whole, shard.offsets, shard.tensor.dtype, lambda: _view(weight(), first, shard))


def _view(flat: Tensor, first: int, part: Part | Shard) -> Tensor:
    return flat.detach().view(-1)[first : first + part.offsets.numel].view(part.offsets.shape)
