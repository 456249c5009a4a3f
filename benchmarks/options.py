"""The arguments that several benchmarks share, written once."""

import argparse
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def parser(doc: str, *, threads: Sequence[int] | int | None = None, peer: bool = False, work: str = "") -> argparse.ArgumentParser:
    """A parser with ``--out``, and with ``--threads``, ``--peer-python`` and ``--work`` where they are given; ``work`` says
    what is kept there."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if peer:
        made.add_argument("--peer-python", default=".venv-peer/bin/python", help="the interpreter that has the peer")
    if isinstance(threads, int):
        made.add_argument("--threads", type=int, default=threads)
    elif threads is not None:
        made.add_argument("--threads", type=int, nargs="+", default=list(threads), help="thread counts, each measured")
    if work:
        made.add_argument("--work", type=Path, default=Path("runs/bench"), help=f"where {work} kept")
    made.add_argument("--out", type=Path, default=RESULTS, help="where the report goes")
    return made
