"""Processes that run functions as the ranks of a mesh. They live for the whole session, because starting one takes seconds."""

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tandem.layout.mesh import GroupName, Mesh, MeshShape
from tandem.runtime.collectives.communicator import Communicator, join

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


class RankContext(NamedTuple):
    """The mesh of a function that runs as a rank, and the process groups of the rank."""

    mesh: Mesh
    groups: dict[GroupName, Communicator]


class Ranks:
    """The processes, started on demand. ``run`` sends ``function`` by name, so it must be defined at the top level of a test module."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, shape: MeshShape, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(here, *arguments)`` on every rank of ``shape`` and returns the results by rank. Raises ``AssertionError`` with the traceback of
        each rank that failed."""
        while len(self._processes) < shape.world:
            command = [sys.executable, str(Path(__file__)), str(Path(sys.modules[function.__module__].__file__ or "").parent)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
            self._processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
        module = str(Path(sys.modules[function.__module__].__file__ or ""))
        with tempfile.TemporaryDirectory() as folder:
            chosen = self._processes[: shape.world]
            for rank, process in enumerate(chosen):
                assert process.stdin is not None
                pickle.dump((module, function.__qualname__, shape, rank, folder, arguments), process.stdin)
                process.stdin.flush()
            answers = [pickle.load(process.stdout) for process in chosen if process.stdout is not None]
        failed = [(rank, text) for rank, (is_good, text) in enumerate(answers) if not is_good]
        if failed:
            # Their groups are in an unknown state.
            self.close()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []


def small_pieces(here: RankContext, piece: int, smallest: int) -> tuple[int, int]:
    """Offloads small models in many pieces on this rank: of ``piece`` numbers, and activations from ``smallest`` bytes. Returns what was set."""
    from tandem.trainer.offload import activations, pager

    before = pager.PIECE, activations.SMALLEST_BYTES
    pager.PIECE, activations.SMALLEST_BYTES = piece, smallest
    return before


def _serve() -> None:
    import importlib.util

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    modules: dict[str, Any] = {}
    while True:
        try:
            module, function, shape, rank, folder, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if module not in modules:
                spec = importlib.util.spec_from_file_location(Path(module).stem, module)
                assert spec is not None and spec.loader is not None
                modules[module] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(modules[module])
            mesh = Mesh(shape, rank)
            store = dist.FileStore(f"{folder}/store", shape.world)
            groups = join(mesh, store, torch.device("cpu"), DEADLINE_S)
            answer = (True, getattr(modules[module], function)(RankContext(mesh, dict(groups)), *arguments))
            groups["world"].barrier("the end of a test's function")
        except BaseException:
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    _serve()
