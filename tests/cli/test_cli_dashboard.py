"""``tandem dashboard`` refuses what it cannot serve with one line."""

import importlib.util
import socket
from pathlib import Path

import pytest

from tandem.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["dashboard", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and message.startswith("tandem: "), message
    return message


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "lines").write_text("a-token-of-24-letters-00\nand another line")
    assert "is not a folder; name the folder with your runs" in refused(capsys, str(tmp_path / "none"))
    assert "is not a folder" in refused(capsys, str(tmp_path / "short"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 cannot be taken" in refused(capsys, str(tmp_path), "--port", str(port))
    assert "--port is 70000" in refused(capsys, str(tmp_path), "--port", "70000")
    assert "is not an address of this machine" in refused(capsys, str(tmp_path), "--host", "no.such.host.invalid", "--port", "0")
    for name in ("short", "lines", "none"):
        assert "--token-file is" in refused(capsys, str(tmp_path), "--port", "0", "--token-file", str(tmp_path / name))


def test_a_missing_extra_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else there(name, *more))
    assert "needs uvicorn, which is not installed; pip install 'tandem-rl[dashboard]'" in refused(capsys, str(tmp_path))
