"""Models of the Hub by name, against a server that speaks its API."""

import hashlib
import json
import sys
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import Hub, Repo

from tandem.model.huggingface.hub import (
    HubModel,
    bytes_to_download,
    cached_folder,
    check_snapshot_bytes,
    hub_model,
    local_folder,
    snapshot_model,
)
from tandem.types import RunError, UserError

NAME = "Qwen/Qwen3-0.6B"
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b'{"top_k": 20}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"pickle",
    "training_args.bin": b"pickle",
    "README.md": b"# Qwen3",
}
READ = {name for name in FILES if not name.endswith((".bin", ".md"))}


@pytest.fixture
def hub(empty_hub: Hub) -> Hub:
    empty_hub.repos[NAME] = Repo()
    empty_hub.repos[NAME].commit(FILES, "v1")
    return empty_hub


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers at the Hub's address."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as raised:
        local_folder(*arguments, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_what_is_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model(NAME) == HubModel(NAME, "main") == hub_model(f"hf://{NAME}")
    assert hub_model(f"{NAME}@v1") == HubModel(NAME, "v1") == hub_model(NAME, "v1") == hub_model(f"hf://{NAME}@v1", "v1")
    assert hub_model(f"https://huggingface.co/{NAME}") == HubModel(NAME) == hub_model(f"https://hf.co/{NAME}/")
    assert hub_model(f"https://huggingface.co/{NAME}/tree/v1") == HubModel(NAME, "v1") and hub_model("https://example.com/a/b") is None
    for path in ("runs/sort/model", "./Qwen/Qwen3", "../Qwen", "/models/qwen", "model", "~/models/x", "s3://bucket/model", Path(NAME), "a/b@", ""):
        assert hub_model(path) is None, path
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert hub_model(NAME) is None and local_folder(NAME) == Path(NAME)
    assert hub_model(f"hf://{NAME}") == HubModel(NAME)
    for wrong in ("hf://model", "hf://a/b/c", "hf://a/b@", "hf://"):
        with pytest.raises(UserError, match="does not name a model of the Hub; write hf://OWNER/NAME"):
            hub_model(wrong)
    with pytest.raises(UserError, match="'v1', and the revision 'v2' is given too"):
        hub_model(f"hf://{NAME}@v1", "v2")


def test_a_model_is_downloaded_once_and_read_offline_afterwards(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = local_folder(NAME)
    assert capfd.readouterr() == ("", ""), "a progress bar is for terminals"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {name: FILES[name] for name in READ}
    assert sorted(hub.downloads()) == sorted(READ)
    commit = hub.repos[NAME].revisions["main"]
    assert snapshot_model(folder) == HubModel(NAME, commit) and folder.name == commit
    hub.requests.clear()
    assert local_folder(NAME) == folder and not hub.downloads()
    hub.requests.clear()
    assert local_folder(f"hf://{NAME}@{commit}") == cached_folder(f"hf://{NAME}@{commit}") == folder and not hub.requests
    cut_off(monkeypatch)
    assert local_folder(NAME) == folder
    go_offline(monkeypatch)
    assert local_folder(NAME) == local_folder(NAME, revision=commit) == folder


def test_a_terminal_shows_a_progress_bar(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    # transformers' own switch, which other tests use, turns them off in the whole process.
    huggingface_hub.utils.enable_progress_bars()
    local_folder(NAME)
    assert "100%" in capsys.readouterr().err


def test_a_revision_is_that_commit_though_the_branch_moves(hub: Hub) -> None:
    first = hub.repos[NAME].revisions["v1"]
    second = hub.repos[NAME].commit({**FILES, "config.json": b'{"model_type": "other"}'})
    assert local_folder(NAME).name == second and local_folder(f"{NAME}@v1").name == first != second
    assert json.loads((local_folder(NAME, revision=first) / "config.json").read_text()) == {"model_type": "qwen3"}


def test_the_modules_of_sentence_transformers_are_downloaded(hub: Hub) -> None:
    names = ["modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    others = ["2_Dense/pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"]
    hub.repos[NAME].commit(FILES | dict.fromkeys([*names, *others], b"{}"))
    folder = local_folder(NAME)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {*READ, *names}


def test_only_the_shards_of_the_index_are_downloaded(hub: Hub) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 1000 for i in (1, 2)}
    index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(shards)}}
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"} | shards
    hub.repos[NAME].commit({**files, "consolidated.safetensors": b"twice", "model.safetensors.index.json": json.dumps(index).encode()})
    folder = local_folder(NAME, "description")
    model = snapshot_model(folder)
    assert model is not None and not list(folder.glob("*.safetensors")) and bytes_to_download(model, folder) == 2000
    assert {path.name for path in local_folder(NAME).glob("*.safetensors")} == set(shards)
    assert bytes_to_download(model, folder) == 0


def test_a_broken_connection_is_resumed_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cuts["model.safetensors"] = [1000, 50_000]
    assert (local_folder(NAME) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [given for method, path, given in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(given.removeprefix("bytes=").rstrip("-")) for given in ranges[1:] if given]
    assert starts == [1000, 51_000]


def test_what_a_failed_download_brought_is_not_downloaded_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.cuts["model.safetensors"] = [0] * 6
    assert "cannot be downloaded" in refusal(NAME)
    hub.requests.clear()
    hub.cuts.clear()
    assert local_folder(NAME).is_dir() and hub.downloads() == ["model.safetensors"]


def test_a_private_model_needs_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["me/secret"] = Repo(token="hf_right")
    hub.repos["me/secret"].commit(FILES)
    wanted = f"'me/secret' is neither a folder here nor a model that {hub.url} shows you; correct the name, or, for a private model, set HF_TOKEN or run"
    assert refusal("me/secret").startswith(wanted)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal("me/secret").startswith(wanted) and "hf_wrong" not in refusal("me/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert (local_folder("me/secret") / "model.safetensors").is_file()


def test_every_failure_is_one_line_with_the_way_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("Qwen/Qwen9").startswith(f"'Qwen/Qwen9' is neither a folder here nor a model that {hub.url} shows you; correct the name")
    assert refusal(f"{NAME}@v9").startswith(f"'{NAME}' has no revision 'v9'; name a branch, a tag or a commit of {hub.url}/{NAME}")
    hub.repos["meta/gated"] = Repo(gated=True)
    hub.repos["meta/gated"].commit(FILES)
    assert f"is gated: accept its conditions at {hub.url}/meta/gated, then set HF_TOKEN" in refusal("meta/gated")
    hub.repos["old/pickles"] = Repo()
    hub.repos["old/pickles"].commit({name: content for name, content in FILES.items() if name != "model.safetensors"})
    assert "'old/pickles' has no model.safetensors; Tandem reads weights in safetensors only" in refusal("old/pickles")
    assert "pytorch_model.bin" not in hub.downloads()
    hub.repos["a/dataset"] = Repo()
    hub.repos["a/dataset"].commit({"README.md": b"none"})
    assert "'a/dataset' has no config.json" in refusal("a/dataset")
    assert refusal("a/b--c").startswith("'a/b--c' is neither a folder here nor a name that the Hub can have: ")
    cut_off(monkeypatch)
    message = refusal(f"{NAME}@v1", option="--model.path=FOLDER")
    assert message.startswith(f"'{NAME}' is not a folder here and cannot be downloaded from http://127.0.0.1:9 (") and "refused" in message
    assert message.endswith(
        f"run 'hf download {NAME} --revision v1 --local-dir Qwen3-0.6B' on a machine that can, copy the folder here and give --model.path=FOLDER"
    )
    go_offline(monkeypatch)
    assert "(HF_HUB_OFFLINE is set and it is not in the cache); correct the path, or run 'hf download" in refusal(NAME)


def test_a_missing_package_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.model.huggingface.hub.importlib.util.find_spec", lambda name: None)
    assert "pip install 'tandem-rl[hub]'" in refusal(NAME)


def test_a_damaged_file_of_the_cache_is_found_by_the_hubs_digest(hub: Hub) -> None:
    folder = local_folder(NAME)
    check_snapshot_bytes(folder)
    assert (folder / "model.safetensors").readlink().name == hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    for name in ("model.safetensors", "config.json"):
        blob = (folder / name).resolve()
        content = blob.read_bytes()
        blob.chmod(0o600)
        blob.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
        with pytest.raises(RunError, match=f"{name}' does not have the digest that the Hub gave for it"):
            check_snapshot_bytes(folder)
        blob.write_bytes(content)
