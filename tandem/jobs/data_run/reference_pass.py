"""The log-probabilities of the reference model on the data of DPO, computed once, before the first step.

The reference is the model that the run starts from, so the actor itself computes them before it has learned anything. ``RUN/reference`` has a
file for each shard (``data.logprob_files``); the journal has its digest once it is whole. A pass that was killed continues with the next
shard, and a file that is damaged or missing is computed again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.config.pretrain import PretrainRecipe
from tandem.data.logprob_files import LogprobFiles
from tandem.data.stream import Piece
from tandem.jobs.data_run.data_run import train_sequences
from tandem.jobs.data_run.train_data import REFERENCE, open_datasets, reference_folder
from tandem.jobs.verify.reference_files import KEY, damaged_reference_files
from tandem.runtime.records.run_records import Records
from tandem.storage.digests import bytes_digest
from tandem.storage.folder_manifest import replace_file
from tandem.trainer.logprobs import infer_sequences, per_token
from tandem.trainer.parallel.replica import Replica

MICRO_BATCHES_AT_ONCE = 16
"""Micro-batches of each data-parallel rank between two exchanges of their results."""


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """The pass of ``recipe`` in ``directory``. Every rank makes the same calls; ``records`` has a journal on the first one."""

    recipe: PretrainRecipe
    directory: Path
    records: Records

    def missing(self) -> list[str]:
        """Returns the files, relative to the run's folder, that are not there as they were written. Only on the first rank."""
        assert self.records.journal is not None
        damaged = set(damaged_reference_files(self.directory, self.records.journal))
        known = self.records.journal.get(KEY) or {}
        return [name for _, _, name in self._files() if name not in known or name in damaged]

    def compute(self, replica: Replica, missing: Sequence[str]) -> None:
        """Computes the files ``missing``, which the first rank knows, with ``replica``, which has the weights of the start model."""
        wanted, ranks = set(missing), replica.ranks
        with self.records.phase(REFERENCE, 0):
            for files, shard, name in self._files():
                if ranks.agreed(name in wanted, "whether the reference is known"):
                    self._compute(replica, files, shard, name)
        # No rank reads a file before it is written.
        ranks.world.barrier("the log-probabilities of the reference")

    def _compute(self, replica: Replica, files: LogprobFiles, shard: int, name: str) -> None:
        data, trainer = self.recipe.data, self.recipe.trainer
        reader = files.files.open(shard)
        values: list[Sequence[float]] = []
        for documents in self._chunks(reader.lengths, trainer.micro_batch_tokens * MICRO_BATCHES_AT_ONCE * replica.ranks.data.size):
            # A pair is left out whole; what is inferred of its other answer is not read.
            fitting = [i for i in documents if reader.lengths[i] <= data.sequence_length]
            pieces = [[Piece(shard, i, 0, reader.tokens(i, 0, reader.lengths[i]), reader.learned(i, 0, reader.lengths[i]))] for i in fitting]
            sequences = train_sequences(pieces)
            inferred = infer_sequences(replica, sequences, trainer.micro_batch_tokens, on_progress=self.records.progress(REFERENCE))
            known = {i: per_token(sequence, of[0]) for i, sequence, of in zip(fitting, sequences, inferred, strict=True)}
            values += [known.get(i, (0.0,) * reader.lengths[i]) for i in documents]
        if replica.ranks.is_first:
            self._write(name, files.content(shard, values))

    def _write(self, name: str, content: bytes) -> None:
        path, journal = self.directory / name, self.records.journal
        assert journal is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
        known, digest = journal.get(KEY) or {}, bytes_digest(content)
        if known.get(name, digest) != digest:
            self.records.callback.message(
                f"'{path}' was computed again, and differs from the one that the run began with: results will not be bit-identical"
            )
        journal.set(KEY, {**known, name: digest})

    def _files(self) -> Iterator[tuple[LogprobFiles, int, str]]:
        """Yields every file: its dataset's, its shard, and its name in the run's folder."""
        for number, (_, shards) in enumerate(open_datasets(self.recipe.data)):
            files = LogprobFiles(reference_folder(self.directory, number), shards, self.recipe.trainer.dtype)
            for shard in range(len(shards.dataset.shards)):
                yield files, shard, str(files.path(shard).relative_to(self.directory))

    @staticmethod
    def _chunks(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
        """Yields the documents in their order, of at most ``most`` tokens together unless one has more."""
        chunk: list[int] = []
        tokens = 0
        for document, length in enumerate(lengths):
            if chunk and tokens + length > most:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(document)
            tokens += length
        yield chunk
