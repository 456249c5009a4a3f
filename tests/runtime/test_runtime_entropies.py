"""The entropies of a run's tokens: kept by step, and never a reason for the run to end."""

import math
from pathlib import Path

import pytest

from tandem.runtime.records.entropies import FILE, EntropyFile, read_entropies
from tandem.types import RunError
from tandem.types.token_entropies import decode_entropies, encode_entropies, pack_halves, unpack_halves


def test_entropies_are_kept_by_step_in_two_bytes_each_and_a_step_that_is_taken_again_replaces_its_own(tmp_path: Path) -> None:
    assert read_entropies(tmp_path, 0) == {} and unpack_halves(pack_halves([0.5, 11.9])) == [0.5, pytest.approx(11.9, rel=1e-3)]
    said: list[str] = []
    file = EntropyFile(tmp_path, said.append)
    file.write(0, b"")
    assert not (tmp_path / FILE).exists(), "a step without any makes no file"
    for values in ([1.0, math.nan], [2.0, 0.25]):
        file.write(3, encode_entropies({"3/p0/0": pack_halves(values), "3/p0/1": pack_halves([])}))
    assert unpack_halves(read_entropies(tmp_path, 3)["3/p0/0"]) == [2.0, 0.25] and read_entropies(tmp_path, 2) == {} == dict.fromkeys(said)
    file.close()
    assert {name: len(halves) for name, halves in read_entropies(tmp_path, 3).items()} == {"3/p0/0": 4, "3/p0/1": 0}


def test_a_file_that_takes_none_is_told_once_and_one_that_is_damaged_is_one_line_for_readers(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    said: list[str] = []
    file = EntropyFile(tmp_path, said.append)
    for step in (4, 5):
        file.write(step, encode_entropies({"s": pack_halves([1.0])}))
    file.close()
    (line,) = said
    assert line.startswith("the entropies of tokens are not kept from step 4 on: ") and FILE in line
    with pytest.raises(RunError, match=FILE):
        read_entropies(tmp_path, 4)
    for broken in (b"", b"x" * 40, encode_entropies({})[:-1]):
        with pytest.raises(ValueError, match="frame"):
            decode_entropies(broken)
    with pytest.raises(ValueError, match="half-precision"):
        unpack_halves(b"abc")
