"""A new user's first hour: the README, the tutorial and the other documents, word for word, in a fresh clone and environment."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_every_block_of_the_documents_does_what_it_says() -> None:
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("walk.py"))], capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
