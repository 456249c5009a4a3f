"""What a run sends a pod of another machine beside the recipe: the files of functions, and of weights that are not trained."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_runs import HERE

from tandem.config.load import to_mapping
from tandem.config.recipe import Recipe, load_config
from tandem.pod.sent_functions import SentFunctions, sent_functions, take_functions
from tandem.pod.sent_weights import PART_BYTES, KeptWeights, send_weights, weight_files
from tandem.runtime.import_path import load_function
from tandem.types import RunError, UserError
from tandem.types.wire import Frame

# -- functions -------------------------------------------------------------------------------------------------------------


def recipe_of(folder: Path, tools: list[str]) -> Recipe:
    text = yaml.safe_load((HERE / "calculator.yaml").read_text())
    text["task"]["tools"] = tools
    (folder / "recipe.yaml").write_text(yaml.safe_dump(text))
    recipe = load_config(folder / "recipe.yaml", [])
    assert isinstance(recipe, Recipe)
    return recipe


def test_a_function_runs_where_only_its_file_and_what_it_imports_of_its_folder_were_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    (own / "parts").mkdir(parents=True)
    (own / "tool_of_mine.py").write_text("import json\nimport near_of_mine\n\ndef double(x: int) -> int:\n    return near_of_mine.twice(x)\n")
    (own / "near_of_mine.py").write_text("def twice(x):\n    from parts.numbers_of_mine import two\n    return two * x\n")
    (own / "parts" / "__init__.py").write_text("")
    (own / "parts" / "numbers_of_mine.py").write_text("two = 2\n")
    (own / "private.py").write_text("secret = 1\n")
    (own / "json.py").write_text("import private\n")
    monkeypatch.chdir(own)
    recipe = recipe_of(own, ["tool_of_mine.py:double", "calculator", "os.path:basename"])
    sent = sent_functions(recipe)
    # A file of the name of a module of Python's is one that this function could import.
    assert sorted(sent.files) == [
        "0/json.py", "0/near_of_mine.py", "0/parts/__init__.py", "0/parts/numbers_of_mine.py", "0/private.py", "0/tool_of_mine.py"
    ]  # fmt: skip
    assert dict(sent.paths) == {"tool_of_mine.py:double": "0/tool_of_mine.py:double"}
    config, there = to_mapping(recipe), tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    for name in sorted(path.name for path in own.rglob("*.py")):
        next(own.rglob(name)).unlink()
    take_functions(config, there / "functions", sent.paths, sent.files)
    assert config["task"]["tools"] == [f"{there}/functions/0/tool_of_mine.py:double", "calculator", "os.path:basename"]
    function, _ = load_function(config["task"]["tools"][0], "tool")
    assert function(21) == 42


def test_files_that_nothing_imports_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(x: int) -> int:\n    return x\n")
    (tmp_path / "private.py").write_text("secret = 1\n")
    assert list(sent_functions(recipe_of(tmp_path, ["mine.py:f"])).files) == ["0/mine.py"]


def test_a_file_that_is_missing_or_too_large_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"'mine\.py:f' is run by pods on other machines too, and '.*mine\.py' cannot be read: No such file"):
        sent_functions(recipe_of(tmp_path, ["mine.py:f"]))
    (tmp_path / "mine.py").write_bytes(b"#" * 70_000_000)
    with pytest.raises(UserError, match=r"the files of mine\.py:f have 70,000,000 bytes, and at most 67,108,864 are sent"):
        sent_functions(recipe_of(tmp_path, ["mine.py:f"]))


@pytest.mark.parametrize("name", ["../outside.py", "/tmp/outside.py", "0/../../outside.py"])
def test_a_file_that_would_be_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not the name of a file below"):
        take_functions({}, tmp_path / "functions", {}, {name: b""})
    assert not (tmp_path / "outside.py").exists()


def test_a_recipe_without_functions_sends_none(tmp_path: Path) -> None:
    recipe = load_config(HERE / "tiny.yaml", [])
    assert isinstance(recipe, Recipe) and sent_functions(recipe) == SentFunctions()


# -- weights ---------------------------------------------------------------------------------------------------------------


class FakePod:
    """Keeps what it is sent in ``folder``. ``alter``: changes the parts on the way. ``sent``: the bytes of all parts."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.model, self.sent, self.alter = KeptWeights(folder / "base"), folder / "model", 0, lambda part: part
        (folder / "model").mkdir(exist_ok=True, parents=True)

    def ask(self, name: str, meta: Any = None, blobs: Any = None) -> Frame:
        assert name == "receive_file"
        self.sent += len(blobs["part"])
        return Frame({"held_bytes": self.kept.receive(meta, self.alter(blobs["part"]), self.model)})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    for name, size in {"model-1.safetensors": 2 * PART_BYTES + 77, "model-2.safetensors": 5, "none.safetensors": 0}.items():
        (folder / name).write_bytes(os.urandom(size))
    return folder


def assert_same(pod: FakePod, base: Path) -> None:
    assert {path.name: path.read_bytes() for path in pod.model.iterdir()} == {path.name: path.read_bytes() for path in base.iterdir()}


def send(pod: FakePod, base: Path) -> None:
    files = weight_files(base)
    pod.kept.expect(files)
    send_weights(pod, base, files)


def test_files_arrive_once_and_the_next_life_has_them(base: Path, tmp_path: Path) -> None:
    size_bytes = sum(path.stat().st_size for path in base.iterdir())
    pod = FakePod(tmp_path / "pod")
    send(pod, base)
    assert_same(pod, base)
    assert pod.sent == size_bytes
    for path in pod.model.iterdir():
        path.unlink()
    again = FakePod(tmp_path / "pod")
    send(again, base)
    assert_same(again, base)
    assert again.sent == 0
    # Those of another model take their place.
    (base / "model-1.safetensors").write_bytes(b"other")
    other = FakePod(tmp_path / "pod")
    send(other, base)
    assert_same(other, base)
    assert other.sent == 5 and len(list((tmp_path / "pod" / "base").iterdir())) == 3


def test_a_transfer_that_broke_goes_on_where_it_ended(base: Path, tmp_path: Path) -> None:
    pod, parts = FakePod(tmp_path / "pod"), [0]

    def break_off(part: Any) -> Any:
        parts[0] += bool(len(part))
        if parts[0] == 2:
            raise ConnectionError
        return part

    pod.alter = break_off
    with pytest.raises(ConnectionError):
        send(pod, base)
    rest = FakePod(tmp_path / "pod")
    send(rest, base)
    assert_same(rest, base)
    assert rest.sent == sum(path.stat().st_size for path in base.iterdir()) - PART_BYTES


def test_a_file_that_was_damaged_on_the_way_or_on_the_disk_is_sent_again_and_twice_is_an_error(base: Path, tmp_path: Path) -> None:
    pod, flips = FakePod(tmp_path / "pod"), [1]

    def flip(part: Any) -> Any:
        if len(part) and flips[0]:
            flips[0] -= 1
            return bytes([part[0] ^ 1]) + bytes(part[1:])
        return part

    pod.alter = flip
    send(pod, base)
    assert_same(pod, base)
    kept = max((tmp_path / "pod" / "base").iterdir(), key=lambda path: path.stat().st_size)
    damaged = bytearray(kept.read_bytes())
    damaged[1000] ^= 1
    kept.unlink()
    kept.write_bytes(damaged)
    again = FakePod(tmp_path / "pod")
    send(again, base)
    assert_same(again, base)
    worse = FakePod(tmp_path / "other")
    flips[0], worse.alter = 1000, flip
    with pytest.raises(RunError, match=r"the weights 'model-1\.safetensors' arrived 2 times without their digest"):
        send(worse, base)


@pytest.mark.parametrize(("name", "digest"), [("../x", "xxh3_128:00"), ("x", "xxh3_128:../../y"), ("x", "/etc/passwd")])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, digest: str, tmp_path: Path) -> None:
    pod = FakePod(tmp_path)
    pod.kept.expect({})
    with pytest.raises(RunError, match=r"is not (the name of a file of a model|a digest of a file)"):
        pod.ask("receive_file", {"name": name, "digest": digest, "size_bytes": 1, "offset": 0}, {"part": b"x"})


def test_a_disk_that_is_too_small_is_said_before_anything_is_sent(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.pod.sent_weights.free_bytes", lambda folder: 1000)
    pod = FakePod(tmp_path / "pod")
    with pytest.raises(RunError, match=r"need 8,388,685 bytes more and the disk of '.*base' has 1,000 free; choose another --folder"):
        send(pod, base)
    assert pod.sent == 0
