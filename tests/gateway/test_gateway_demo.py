"""``tandem gateway --demo``: two real servers, a key, the page in a real browser, and nothing left behind."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser import browser, tab
from http_processes import COMMAND, until

from tandem.cli.main import main
from tandem.text.characters import make_character_tokenizer

DIGITS = "0123456789="


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--demo"], "there is no model in 'runs/sort/model'; 'make run' or 'tandem train sort' makes it"),
        (["--demo", "nothing"], "there is no model in 'nothing'; name a model's or a run's folder"),
        (["--backends", "http://a", "--demo"], "--demo has its own servers and settings; leave out --backends"),
        (["gateway.yaml", "--demo"], "leave out the file 'gateway.yaml'"),
        (["--no-browser", "--backends", "http://a"], "--no-browser is for --demo"),
    ],
)
def test_a_demo_that_cannot_start_says_why(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["gateway", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and says in lines[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run was made: a model that has not learned anything, with the tokenizer of the recipe `sort`."""
    from tandem.kernels import select
    from tandem.layout.shapes import ModelShapes
    from tandem.model.decoder import Decoder
    from tandem.model.huggingface.model_folder import save_model
    from tandem.model.initialise import initialise

    folder = tmp_path_factory.mktemp("run")
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    make_character_tokenizer(DIGITS, tokenizer)
    shapes = ModelShapes(
        architecture="qwen3", vocab_size=3 + len(DIGITS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    decoder = Decoder(shapes, select("reference"))
    initialise(decoder, 0)
    save_model(decoder, folder / "runs" / "sort" / "model", tokenizer, eos_token_id=2)
    return folder


@pytest.fixture
def demo(run: Path, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str, Path]]:
    """A running demo, the address that it prints, and the folder of its temporary files."""
    opened, temporary, script = tmp_path / "opened", tmp_path / "temporary", tmp_path / "browser"
    temporary.mkdir()
    script.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    script.chmod(0o755)
    log = tmp_path / "log"
    environment = {**os.environ, "DISPLAY": ":77", "BROWSER": str(script), "TMPDIR": str(temporary)}
    with log.open("wb") as sink:
        process = subprocess.Popen([COMMAND, "gateway", "--demo", "--port", "0"], cwd=run, stdout=sink, stderr=sink, env=environment, start_new_session=True)
    try:
        until(lambda: opened.exists() or process.poll() is not None, "the page to be opened")
        assert process.poll() is None, log.read_text()
        until(lambda: opened.read_text().strip(), "the address")
        address = opened.read_text().strip()
        assert f"tandem: open {address}\n" in log.read_text()
        yield process, address, temporary
    finally:
        process.kill()
        process.wait()


def servers(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.full
def test_the_demo_answers_in_the_page_and_ctrl_c_ends_all_of_it(demo: tuple[Any, str, Path]) -> None:
    process, address, temporary = demo
    url, _, key = address.partition("/#key=")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url) and httpx.get(f"{url}/readiness").status_code == 200
    ask = {"model": "sort", "prompt": "312=", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=ask).status_code == 401
    assert httpx.post(f"{url}/v1/completions", json=ask, headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    assert all(f'tandem_gateway_backend_ready{{backend="sort-{number}"}} 1.0' in metrics for number in (0, 1))
    with browser() as started, tab(started) as opened:
        opened.open(address)
        assert opened.page.url == f"{url}/" and opened.texts("#model option") == ["sort (weights 0.0)"]
        opened.page.click("#open-settings")
        # At temperature 1 a model that has not learned anything ends one answer of 14 before it begins.
        opened.page.fill("[name=temperature]", "0")
        opened.page.fill("[name=max_tokens]", "5")
        opened.page.check("[name=probabilities]")
        opened.page.get_by_role("button", name="Done").click()
        opened.say("312=")
        facts = opened.texts(".facts")[0]
        assert facts.startswith("weights 0.0 · ") and "plain text" in facts and opened.texts(".answer .note:visible") != ["The answer is empty."]
        opened.page.get_by_role("button", name="Probabilities").click()
        opened.wait_end()
        assert opened.page.locator(".token").count() == 5
        opened.page.locator(".token").first.click()
        assert len(opened.texts(".token-detail tbody tr")) >= 5
        opened.open(f"{url}/admin")
        opened.page.wait_for_selector("#servers td")
        assert "2 of 2" in opened.texts("#servers tbody tr")[0] and "sort" in opened.texts("#servers tbody tr")[0]
        assert opened.violations() == []
    children = servers(process)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 0
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), "the servers to end")
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_the_servers_of_a_demo_that_is_killed_die_with_it(demo: tuple[Any, str, Path]) -> None:
    process, _, _ = demo
    children = servers(process)
    assert len(children) >= 2
    process.kill()
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), "the servers to die")


@pytest.mark.full
def test_a_closed_terminal_ends_the_demo(demo: tuple[Any, str, Path]) -> None:
    process, _, temporary = demo
    children = servers(process)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) != 0
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), "the servers to end")
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_sigterm_while_the_servers_load_leaves_nothing(run: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [COMMAND, "gateway", "--demo", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, cwd=run, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        until(lambda: len(servers(process)) >= 2, "both servers to be started")
        children = servers(process)
        process.terminate()
        assert process.wait(60) in (0, 130), "drained, or interrupted before it served"
        until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), "the servers to end")
    assert list(tmp_path.iterdir()) == []
