"""Distributed tokenizing: the shards are a function of the source, the tokenizer and the settings, even if processes die."""

import contextlib
import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tandem.data.shards import Shard, ShardReader
from tandem.data.tokenizing.documents import DocumentFormat, Part, divide, documents
from tandem.data.tokenizing.tokenize import DATASET, TokenizedDataset, TokenizeSettings, read_dataset, tokenize
from tandem.data.tokenizing.train_tokenizer import train_tokenizer
from tandem.storage.files import StoredFile, open_storage
from tandem.text.tokenizer import Tokenizer
from tandem.types import RunError, UserError

TEXTS = [f"document {i}: " + "naïve 数 café \u2028 line\n" * (i % 7) + "x" * (i * 37 % 211) for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a byte-level BPE with an end-of-sequence token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Writes the texts as JSON lines, compressed JSON lines and whole files, in folders."""
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    lines = [json.dumps({"text": text, "id": i}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("".join(lines[:200]), encoding="utf-8")
    with gzip.open(folder / "deep" / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(lines[200:280])
    for i in range(280, 300):
        (folder / "deep" / "er" / f"{i}.txt").write_text(TEXTS[i], encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    return folder


def settings(source: Path, destination: Path, tokenizer: Path, **changed: object) -> TokenizeSettings:
    return TokenizeSettings(str(source), str(destination), str(tokenizer), **{"unit_bytes": 3000, "workers": 2, **changed})  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def decoded(folder: Path, tokenizer: Path) -> list[str]:
    backend = Backend.from_file(str(tokenizer / "tokenizer.json"))
    dataset = read_dataset(open_storage(str(folder)))
    texts = []
    for shard in dataset.shards:
        reader = ShardReader(folder / f"{shard.name}.tar", folder / f"{shard.name}.lengths", shard, dataset.dtype)
        for i, length in enumerate(reader.lengths):
            ids = list(reader.tokens(i, 0, length))
            assert ids[-1] == 0, "every document ends with the end of sequence"
            texts.append(backend.decode(ids[:-1]))
    return texts


def test_every_document_is_there_once_and_decodes_to_its_text(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    found = tokenize(settings(source, tmp_path / "tokens", tokenizer_folder), lambda *now: seen.append(now))
    assert found.documents == 300 and len(found.shards) > 5 and found.dtype == "uint16"
    assert sorted(decoded(tmp_path / "tokens", tokenizer_folder)) == sorted(TEXTS)
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert found.tokens == sum(len(backend.encode(text).ids) + 1 for text in TEXTS)
    done, total, _ = seen[-1]
    assert done == total == sum(path.stat().st_size for path in source.rglob("*") if path.suffix in (".jsonl", ".gz", ".txt"))
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(seen)), "the bar never goes back"


def test_shards_are_the_same_bytes_for_any_number_of_workers(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        tokenize(settings(source, tmp_path / str(workers), tokenizer_folder, workers=workers))
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_webdataset_reads_the_shards(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed, so that it reads our shards is not shown here")
    found = tokenize(settings(source, tmp_path / "tokens", tokenizer_folder))
    urls = [str(tmp_path / "tokens" / f"{shard.name}.tar") for shard in found.shards]
    arrays = [sample["npy"] for sample in webdataset.WebDataset(urls, shardshuffle=False).decode()]
    backend = Backend.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert [backend.decode(array.tolist()[:-1]) for array in arrays] == decoded(tmp_path / "tokens", tokenizer_folder)


def token_ids(folder: Path) -> list[list[int]]:
    dataset = read_dataset(open_storage(str(folder)))
    ids = []
    for shard in dataset.shards:
        reader = ShardReader(folder / f"{shard.name}.tar", folder / f"{shard.name}.lengths", shard, dataset.dtype)
        ids += [list(reader.tokens(i, 0, length)) for i, length in enumerate(reader.lengths)]
    return ids


@pytest.mark.parametrize("kind", ["txt", "json"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_shards_of_webdataset_give_the_tokens_of_the_same_json_lines(kind: str, suffix: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed, so that its shards are read is not shown here")
    lines, shards = tmp_path / "lines", tmp_path / "shards"
    lines.mkdir()
    shards.mkdir()
    for number, texts in enumerate((TEXTS[:170], TEXTS[170:])):
        (lines / f"{number}.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts), encoding="utf-8")
        with webdataset.TarWriter(str(shards / f"{number}{suffix}")) as writer:
            for i, text in enumerate(texts):
                sample = {"__key__": f"folder.v1/{i:05d}", "jpg.raw": b"\xff\xd8" * 700, "cls": i % 10}
                # A text is the document; the object beside it is its metadata.
                sample |= {"json": {"content": text, "i": i}} if kind == "json" else {"json": {"width": i}, "txt": text}
                writer.write(sample)
    form = DocumentFormat(text_key="content")
    tokenize(settings(lines, tmp_path / "a", tokenizer_folder, form=form))
    dataset = tokenize(settings(shards, tmp_path / "b", tokenizer_folder, form=form))
    assert dataset.skipped == 0 and token_ids(tmp_path / "b") == token_ids(tmp_path / "a")
    assert [len(shard) for shard in divide(open_storage(str(shards)).files(), form, 100)] == [1, 1], "a shard is not divided"


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"a.txt": b"fine", "b.txt": b"caf\xe9"}, "shard.tar, member b.txt: not UTF-8"),
        ({"a.txt": b"fine", "b.json": b"{"}, "shard.tar, member b.json: not valid JSON"),
        ({"a.txt": b"fine", "b.json": b'{"caption": "x"}'}, "shard.tar, member b.json: there is no text under the key 'text' (it has 'caption')"),
        ({"000.npy": b"\x93NUMPY", "__meta__/a.txt": b"x", ".hidden.txt": b"x", "README": b"x"}, "shard.tar: no member ends in .txt or .md or .json"),
    ],
)
def test_broken_member_of_a_shard_is_one_line_or_is_skipped(members: dict[str, bytes], problem: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write_shard(tmp_path / "s" / "shard.tar", members)
    with pytest.raises(UserError) as caught:
        tokenize(settings(tmp_path / "s", tmp_path / "t", tokenizer_folder))
    assert problem in str(caught.value) and "\n" not in str(caught.value)
    tokenize(settings(tmp_path / "s", tmp_path / "u", tokenizer_folder, form=DocumentFormat(skip_broken=True)))
    assert read_dataset(open_storage(str(tmp_path / "u"))).skipped == 1
    assert decoded(tmp_path / "u", tokenizer_folder) == ["fine"] * ("a.txt" in members)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_shard_cut_anywhere_is_one_broken_document_after_those_before_the_cut(suffix: str, tmp_path: Path) -> None:
    texts = [f"text {i} " * 90 for i in range(6)]
    path = tmp_path / "whole.tar"
    write_shard(path, {f"{i}.txt": text.encode() for i, text in enumerate(texts)})
    whole = path.read_bytes() if suffix == ".tar" else gzip.compress(path.read_bytes())
    path.unlink()
    storage, form = open_storage(str(tmp_path)), DocumentFormat(skip_broken=True)
    # At every block of the tar: in contents, in headers, at the ends of members, and before the end-of-archive marker.
    end = 6 * (512 + 1024) if suffix == ".tar" else len(whole) - 1
    for cut in {*range(1, end + 1, 97), *range(512, end + 1, 512), end}:
        (tmp_path / f"cut{suffix}").write_bytes(whole[:cut])
        read = list(documents(storage, Part(f"cut{suffix}", 0, cut), form))
        assert [document.text for document in read[:-1]] == texts[: len(read) - 1]
        assert read[-1].text is None and read[-1].problem.startswith("damaged: ") and "\n" not in read[-1].problem
    (tmp_path / f"cut{suffix}").write_bytes(whole)
    assert [document.text for document in documents(storage, Part(f"cut{suffix}", 0, len(whole)), form)] == texts


def test_command_says_of_a_cut_shard_one_line(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write_shard(tmp_path / "s" / "shard.tar", {"a.txt": b"x" * 5000})
    os.truncate(tmp_path / "s" / "shard.tar", 3000)
    command = [sys.executable, "-m", "tandem.cli.main", "tokenize", str(tmp_path / "s"), str(tmp_path / "t"), "--tokenizer", str(tokenizer_folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == (
        "tandem: shard.tar: damaged: unexpected end of data; correct it, remove it or skip broken documents\n"
    )


def test_shard_is_streamed_and_members_of_other_kinds_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.tar"
    with tarfile.open(path, "w") as archive:
        for i in range(2000):
            for name, size in ((f"{i}.jpg", 20_000), (f"{i}.txt", 1000)):
                header = tarfile.TarInfo(name)
                header.size = size
                archive.addfile(header, io.BytesIO(b"x" * size))
    assert path.stat().st_size > 40e6
    storage, form = open_storage(str(tmp_path)), DocumentFormat()
    tracemalloc.start()
    count = sum(1 for _ in documents(storage, Part("big.tar", 0, path.stat().st_size), form))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2000 and peak < 500_000, "neither contents nor headers accumulate"


@pytest.mark.parametrize("unit_bytes", [1, 17, 1000, 10**9])
def test_byte_ranges_cut_json_lines_without_losing_or_doubling_one(unit_bytes: int, tmp_path: Path) -> None:
    lines = [json.dumps({"text": "x" * (i % 23)}) + "\n" for i in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(lines).rstrip("\n"))
    storage, form = open_storage(str(tmp_path)), DocumentFormat()
    units = divide(storage.files(), form, unit_bytes)
    found = [document for unit in units for part in unit for document in documents(storage, part, form)]
    assert [document.text for document in found] == [json.loads(line)["text"] for line in lines]
    assert sum(document.size for document in found) == (tmp_path / "a.jsonl").stat().st_size


def test_small_files_share_a_unit_and_files_of_other_kinds_are_left_out() -> None:
    files = [StoredFile("a.txt", 10), StoredFile("b.txt", 0), StoredFile("c.png", 99), StoredFile("d.jsonl", 25), StoredFile("e.md", 5)]
    assert [[tuple(part) for part in unit] for unit in divide(files, DocumentFormat(), 20)] == [
        [("a.txt", 0, 10), ("d.jsonl", 0, 10)], [("d.jsonl", 10, 25), ("e.md", 0, 5)],
    ]


def test_killed_worker_is_replaced_and_the_bytes_are_the_same(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenize(settings(source, tmp_path / "calm", tokenizer_folder))
    killed: list[int] = []

    def kill_one(done: int, total: int, tokens: int) -> None:
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        if done > total / 3 and not killed:
            workers = [int(pid) for pid in children if b"tokenize_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            killed.extend(workers[:1])
            os.kill(workers[0], signal.SIGKILL)

    tokenize(settings(source, tmp_path / "storm", tokenizer_folder), kill_one)
    assert killed and contents(tmp_path / "storm") == contents(tmp_path / "calm")


def test_killed_command_goes_on_where_it_was(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenize(settings(source, tmp_path / "calm", tokenizer_folder, unit_bytes=400))
    command = [
        sys.executable, "-m", "tandem.cli.main", "tokenize", str(source), str(tmp_path / "storm"), "--tokenizer", str(tokenizer_folder),
        "--shard-mib", str(400 / 2**20), "--workers", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True)
    units = tmp_path / "storm" / "units"
    while process.poll() is None and len(list(units.glob("0*.json")) if units.exists() else []) < 5:
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "storm" / DATASET).exists(), "it was killed before the end"
    done = {path.name: path.stat().st_mtime_ns for path in units.glob("0*.json")}
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "300 documents" in again.stdout
    assert {name: (units / name).stat().st_mtime_ns for name in done} == done, "what was done is not done again"
    hidden = [name for name in contents(tmp_path / "storm") if name.split("/")[-1].startswith(".")]
    assert hidden == [] and contents(tmp_path / "storm") == contents(tmp_path / "calm")


def test_second_command_on_a_destination_is_refused_and_harms_neither(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def again(done: int, total: int, tokens: int) -> None:
        if not refused:
            with pytest.raises(UserError) as caught:
                tokenize(settings(source, tmp_path / "both", tokenizer_folder))
            refused.append(str(caught.value))

    tokenize(settings(source, tmp_path / "both", tokenizer_folder, workers=1), again)
    tokenize(settings(source, tmp_path / "one", tokenizer_folder))
    assert "another process is writing to" in refused[0] and contents(tmp_path / "both") == contents(tmp_path / "one")


def test_command_in_a_terminal_shows_a_bar_with_the_rate(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [
        sys.executable, "-m", "tandem.cli.main", "tokenize", str(source), str(tmp_path / "t"), "--tokenizer", str(tokenizer_folder),
        "--shard-mib", "0.005", "--workers", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # The signal of a terminal that was closed.
        while data := os.read(ours, 1 << 16):
            shown += data
    os.close(ours)
    assert process.communicate()[0].startswith(b"300 documents") and process.returncode == 0
    assert b"tokenizing" in shown and b" tokens, " in shown and b"/s" in shown


def test_interrupted_command_says_so_in_one_line_and_leaves_no_process(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (big / "a.jsonl").write_text((json.dumps({"text": "word " * 2000}) + "\n") * 3000)
    command = [sys.executable, "-m", "tandem.cli.main", "tokenize", str(big), str(tmp_path / "t"), "--tokenizer", str(tokenizer_folder), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, text=True)
    while not (tmp_path / "t" / "plan.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == "tandem: interrupted\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "fine"}\n{"txt": "mistyped"}\n', "the line at byte 17: there is no text under the key 'text' (it has 'txt')"),
        (b'{"text": "fine"}\n\n{"text": "x"}\n', "the line at byte 17: not valid JSON"),
        (b'{"text": "fine"}\n{"text": "\xff"}\n', "the line at byte 17: not UTF-8"),
        (b'{"text": 5}\n', "the line at byte 0: there is no text"),
        (b"[]\n", "it is not a JSON object"),
    ],
)
def test_broken_document_is_one_line_with_file_and_place(content: bytes, said: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "broken.jsonl").write_bytes(content)
    with pytest.raises(UserError) as caught:
        tokenize(settings(tmp_path / "s", tmp_path / "t", tokenizer_folder))
    assert "broken.jsonl, " in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_shard_that_was_lost_cut_or_whose_record_is_damaged_is_made_again(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "t"
    tokenize(settings(source, tokens, tokenizer_folder))
    whole = contents(tokens)
    (tokens / "shard-000000.tar").unlink()
    os.truncate(tokens / "shard-000001.tar", 100)
    (tokens / "shard-000002.lengths").unlink()
    (tokens / "units" / "000003.json").write_text("{")
    tokenize(settings(source, tokens, tokenizer_folder))
    assert contents(tokens) == whole


def test_command_says_of_a_broken_document_one_line_and_makes_no_folder_for_nothing(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "broken.jsonl").write_bytes(b"[]\n")
    command = [sys.executable, "-m", "tandem.cli.main", "tokenize", str(tmp_path / "s"), str(tmp_path / "t"), "--tokenizer", str(tokenizer_folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "broken.jsonl, the line at byte 0" in done.stderr
    (tmp_path / "s" / "broken.jsonl").unlink()
    with pytest.raises(UserError, match="contains no document"):
        tokenize(settings(tmp_path / "s", tmp_path / "u", tokenizer_folder))
    assert not (tmp_path / "u").exists()


def test_broken_documents_can_be_skipped_and_are_counted(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    (source / "broken.jsonl").write_bytes(b'{"text": "fine"}\n{\n{"text": "\xff"}\n{"other": 1}\n')
    (source / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (source / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "before the cut"}\n' * 500)[:-20])
    with pytest.raises(UserError, match="skip broken documents"):
        tokenize(settings(source, tmp_path / "t", tokenizer_folder))
    found = tokenize(settings(source, tmp_path / "u", tokenizer_folder, form=DocumentFormat(skip_broken=True)))
    texts = decoded(tmp_path / "u", tokenizer_folder)
    assert found.skipped == 5 and texts.count("fine") == 1 and len(set(TEXTS) - set(texts)) == 0


def test_excluded_names_are_left_out(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    found = tokenize(settings(source, tmp_path / "t", tokenizer_folder, form=DocumentFormat(exclude=("deep/er/*", "*.gz"))))
    assert sorted(decoded(tmp_path / "t", tokenizer_folder)) == sorted(TEXTS[:200]) and found.documents == 200


def test_sides_divide_the_documents_without_overlap(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    sides = {side: settings(source, tmp_path / side, tokenizer_folder, side=side, held_out_share=0.3) for side in ("train", "held_out")}
    for side in sides.values():
        tokenize(side)
    train, held_out = (decoded(tmp_path / side, tokenizer_folder) for side in sides)
    assert sorted(train + held_out) == sorted(TEXTS) and not set(train) & set(held_out)
    assert 0.2 < len(held_out) / len(TEXTS) < 0.4


def test_learned_tokenizer_encodes_any_text_and_is_not_written_over(source: Path, tmp_path: Path) -> None:
    assert train_tokenizer(open_storage(str(source)), DocumentFormat(), 500, tmp_path / "t") == 500
    tokenizer = Tokenizer.from_folder(tmp_path / "t")
    assert tokenizer.vocab_size == 500 and tokenizer.eos_token_ids == (0,)
    for text in ("naïve 数 café", "\0\x7f 🎉 nothing like it was seen", " \n\t "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("document 7: naïve")) < 10, "it has learned what is frequent"
    with pytest.raises(UserError, match="has a tokenizer already"):
        train_tokenizer(open_storage(str(source)), DocumentFormat(), 500, tmp_path / "t")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a.txt").write_text("aa aa")
    assert train_tokenizer(open_storage(str(tmp_path / "small")), DocumentFormat(suffixes=(".txt",)), 10**6, tmp_path / "few") == 257 + 2
    with pytest.raises(UserError, match="at least 257"):
        train_tokenizer(open_storage(str(source)), DocumentFormat(), 100, tmp_path / "u")


def test_what_cannot_work_is_refused_before_any_work(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("mine")
    cases = [
        (settings(tmp_path / "nix", tmp_path / "t", tokenizer_folder), "is not a folder"),
        (settings(empty, tmp_path / "t", tokenizer_folder), "contains no document"),
        (settings(source, tmp_path / "t", empty), "no tokenizer.json"),
        (settings(source, source, tokenizer_folder), "source and destination are both"),
        (settings(source, full, tokenizer_folder), "contains other files (letter.txt)"),
        (settings(source, tmp_path / "t", tokenizer_folder, workers=-1), "number of workers is -1"),
        (settings(source, tmp_path / "t", tokenizer_folder, form=DocumentFormat(suffixes=("txt",))), "must begin with a dot"),
        (settings(Path("nosuch://bucket/x"), tmp_path / "t", tokenizer_folder), "nosuch:"),
    ]
    for wrong, said in cases:
        with pytest.raises(UserError) as caught:
            tokenize(wrong)
        assert said in str(caught.value)
    assert (full / "letter.txt").read_text() == "mine" and list(full.iterdir()) == [full / "letter.txt"]


def test_destination_begun_with_other_settings_is_refused_by_name(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenize(settings(source, tmp_path / "t", tokenizer_folder))
    with pytest.raises(UserError, match="started with another append_end"):
        tokenize(settings(source, tmp_path / "t", tokenizer_folder, append_end=False))
    (source / "more.txt").write_text("more")
    with pytest.raises(UserError, match=r"started with another .*sources"):
        tokenize(settings(source, tmp_path / "t", tokenizer_folder))


def test_damaged_dataset_and_shards_are_named(source: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    found = tokenize(settings(source, tmp_path / "t", tokenizer_folder))
    shard = found.shards[0]
    tar, lengths = tmp_path / "t" / f"{shard.name}.tar", tmp_path / "t" / f"{shard.name}.lengths"
    whole = lengths.read_bytes()
    lengths.write_bytes(whole[:-4])
    with pytest.raises(RunError, match="lengths of shard 'shard-000000' are damaged"):
        ShardReader(tar, lengths, shard, found.dtype)
    lengths.write_bytes(whole)
    tar.write_bytes(tar.read_bytes()[:-512])
    with pytest.raises(RunError, match="instead of"):
        ShardReader(tar, lengths, shard, found.dtype)
    (tmp_path / "t" / DATASET).write_text("{")
    with pytest.raises(UserError, match=r"dataset.json in .* is damaged"):
        read_dataset(open_storage(str(tmp_path / "t")))


def test_every_bit_of_dataset_json_is_covered(tmp_path: Path) -> None:
    dataset = TokenizedDataset("t" * 32, 64, 1, "uint16", (Shard("shard-000000", 2, 7, 4096, "a" * 32, "b" * 32),))
    whole = dataset.to_json()
    for place in range(len(whole)):
        (tmp_path / "dataset.json").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_dataset(open_storage(str(tmp_path)))
        except UserError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
        else:
            # A blank between two values that became another one.
            assert found == dataset and whole[place : place + 1].isspace()
