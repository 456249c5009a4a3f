"""The chunks of logits against brute force, and their bytes against a calculation by hand."""

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training_bytes import head_bytes
from tandem.layout import lm_head
from tandem.layout.shapes import ModelShapes

MIB = 1 << 20


@pytest.mark.parametrize("budget", [1, 256 * 700, 1 << 18, 1 << 30])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (255, 257), (600, 1100), (3000, 97), (20, 4000)])
def test_rectangles_hold_every_logit_once_and_stop_only_between_blocks(rows: int, vocabulary: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "BACKWARD_LOGITS", budget)
    seen = [[0] * vocabulary for _ in range(rows)]
    last: dict[tuple[str, int], int] = {}
    for down, across in lm_head.backward_rectangles(rows, vocabulary):
        assert down.start % 256 == 0 and across.start % 256 == 0
        assert (down.stop - down.start) * (across.stop - across.start) <= max(budget, 256 * 256)
        # Sums over tokens and over the vocabulary are added in their order.
        assert last.get(("row", down.start), 0) == across.start and last.get(("column", across.start), 0) == down.start
        last["row", down.start], last["column", across.start] = across.stop, down.stop
        for row in seen[down]:
            row[across] = [count + 1 for count in row[across]]
    assert all(count == 1 for row in seen for count in row)


@pytest.mark.parametrize(("rows", "vocabulary", "logits"), [(0, 5, 1), (1, 5, 1), (1000, 50, 64 * 50), (1000, 50, 7777), (100, 1 << 20, 5)])
def test_chunks_are_whole_tiles_of_rows(rows: int, vocabulary: int, logits: int) -> None:
    chunks = lm_head.row_chunks(rows, vocabulary, logits)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    for chunk in chunks:
        assert chunk.start % 64 == 0 and (chunk.stop - chunk.start) * vocabulary <= max(logits, 64 * vocabulary)


def test_bytes_of_logits_worked_by_hand() -> None:
    # Small logits are kept, beside a gradient of 2048 x 2048; large ones exist 128 rows at a time, beside a packed head of up to 64 MiB.
    assert lm_head.logits_bytes(4096, 4096, 64) == 4 * 4096 * 4096 + 16 * MIB
    assert lm_head.logits_bytes(100, 50, 8) == 2 * 4 * 100 * 50
    assert lm_head.logits_bytes(32_768, 151_936, 1024) == 4 * 128 * 151_936
    assert lm_head.logits_bytes(32_768, 151_936, 64) == 4 * 128 * 151_936 + 4 * 64 * 151_936
    assert lm_head.logits_bytes(32_768, 32_000, 1024) == 16 * MIB
    assert lm_head.logits_bytes(0, 151_936, 64) == 0


def test_ranks_hold_the_logits_of_their_tokens_or_their_ids() -> None:
    shapes = ModelShapes("llama", 151_936, 1024, 2, 4, 2, 256, 96, 128, tie_word_embeddings=False)
    assert head_bytes(shapes, 32_768) == 4 * 128 * 151_936
    assert head_bytes(shapes, 200, ParallelConfig(context=2)) == 4 * 100 * 151_936 + 4 * 100 * 16_384
    assert head_bytes(shapes, 32_768, ParallelConfig(tensor=2)) == 4 * 4 * 64 * 75_968
    gathered = 2 * 4 * 151_936 * 1024
    assert head_bytes(shapes, 32_768, ParallelConfig(tensor=2, deterministic=True)) == gathered + 4 * 128 * 151_936


def test_bytes_of_more_tokens_than_any_memory_holds_are_counted_at_once() -> None:
    # A list of all the chunks would not fit in memory.
    assert lm_head.parallel_logits_bytes(10**30, 50) == 4 * 4 * ((4 << 20) // (64 * 50) * 64) * 50
    assert lm_head.gpu_logits_bytes(10**30, 1 << 20) == 4 * (256 << 20)
