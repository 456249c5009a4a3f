"""The scores of whole sequences by a model with a value head."""

from collections.abc import Sequence

from tandem.trainer.logprobs import Inferring, infer_sequences
from tandem.trainer.step import Progress
from tandem.types import TrainSequence


def scored_sequence(name: str, token_ids: Sequence[int], pad_token_id: int | None = None, margin: float = 0.0) -> TrainSequence:
    """Returns ``token_ids`` as a sequence of which the value of the last state counts.

    That state is the one that would predict a further token, so the sequence has one, which no network reads. Ids ``pad_token_id`` at the end are
    left out, as transformers does: it reads the state of the last other token, also where a tokenizer pads with its end of sequence."""
    count = len(token_ids)
    while count > 1 and token_ids[count - 1] == pad_token_id:
        count -= 1
    return TrainSequence(name, (*token_ids[:count], 0), count, (0.0,) * count + (1.0,), margin=margin)


def sequence_scores(
    forward: Inferring, sequences: Sequence[TrainSequence], micro_batch_tokens: int, on_progress: Progress | None = None
) -> list[float]:
    """Returns the score of each of ``sequences`` (``scored_sequence``). Every rank of the mesh is given all of them and returns all scores."""
    values = infer_sequences(forward, sequences, micro_batch_tokens, on_progress=on_progress)
    return [float(rows[-1, 0]) for rows in values]
