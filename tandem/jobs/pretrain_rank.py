"""The process of one rank of a pretraining run. Started by ``supervise``, which holds the run's lock."""

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.jobs.rank_events import EventPipe
from tandem.layout.mesh import Mesh, MeshShape
from tandem.runtime.faults import FaultPlan, no_fault
from tandem.runtime.gpus import Device
from tandem.runtime.listener import Listener
from tandem.runtime.logs import log_uncaught, setup
from tandem.runtime.rank_board import RankBoard
from tandem.runtime.stacks import answer_with_stacks
from tandem.types import UserError

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
SAVING_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """``directory``: of the run. ``shape``: of the mesh, which may be smaller than the recipe's. ``rendezvous``: a file in which the
    ranks meet, new for every start. ``events``: the descriptor of the pipe to the supervisor. ``threads``: of this process. ``again``: the
    recorded step that is run again, after those before it, instead of a run. ``device``: ``cpu``, or ``cuda``, of which rank r takes GPU r."""

    directory: str
    rank: int
    shape: dict[str, int]
    rendezvous: str
    board: str
    stacks: str
    events: int
    threads: int
    resumed: bool
    faults: str
    again: int | None = None
    device: Device = "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(settings: RankSettings) -> int:
    directory, pipe = Path(settings.directory), EventPipe(settings.events)
    setup(f"rank-{settings.rank}", directory / "logs")
    log_uncaught()
    answer_with_stacks(Path(settings.stacks))
    mesh = Mesh(MeshShape(**settings.shape), settings.rank)
    board = RankBoard(Path(settings.board), mesh.shape.world).writer(settings.rank)
    try:
        result = _train(settings, mesh, board, pipe)
    except UserError as error:
        from tandem.runtime.communicator import CollectiveError

        logger.error("%s", error)
        pipe.send("ended", "collective" if isinstance(error, CollectiveError) else "error", str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        pipe.send("ended", "stopped", "", 130)
        return 130
    except Exception as error:
        logger.exception("rank %s failed", settings.rank)
        pipe.send("ended", "defect", f"{type(error).__name__}: {' '.join(str(error).split())}", 1)
        return 1
    pipe.send("ended", "done", result, 0)
    return 0


def _train(settings: RankSettings, mesh: Mesh, board: Any, pipe: EventPipe) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist

    from tandem.jobs.pretrain_again import run_again
    from tandem.jobs.start_pretraining import opened_run, rank_device, train_on
    from tandem.runtime.communicator import connect, join
    from tandem.trainer.parallel.ranks import Ranks

    directory = Path(settings.directory)
    recipe = load_config(directory / "config.yaml")
    assert isinstance(recipe, PretrainRecipe)
    torch.set_num_threads(settings.threads)
    device = rank_device(settings.device, mesh.rank)
    store = dist.FileStore(settings.rendezvous, mesh.shape.world)
    groups = join(mesh, store, device, recipe.parallel.collective_timeout_s, board, LOOPBACK)
    faults = FaultPlan.parse(settings.faults).point(f"rank{mesh.rank}", directory) if settings.faults else no_fault
    listener = pipe if mesh.rank == 0 else Listener()
    # A slow disk is no hang, and a rank that dies is noticed at once.
    apart = dist.PrefixStore("checkpoints/", store)
    saving = connect("checkpoints", mesh.rank, mesh.shape.world, apart, torch.device("cpu"), SAVING_DEADLINE_S)
    ranks = Ranks(mesh, groups, recipe.parallel.deterministic, recipe.parallel.sequence_parallel, device)
    if settings.again is not None:
        with opened_run(ranks, recipe, directory, listener, board=board, saving=saving, at_most=settings.again) as run:
            run_again(run, settings.again)
        groups["world"].barrier("the end")
        return None
    result = train_on(ranks, recipe, directory, listener, resumed=settings.resumed, board=board, fault_point=faults, saving=saving)
    # Nobody leaves while another still waits for its last words.
    groups["world"].barrier("the end")
    return None if result is None else result.to_json()


if __name__ == "__main__":
    # A supervisor that was killed takes its ranks with it; one that is interrupted ends them itself.
    status = main(RankSettings(**json.loads(sys.argv[1])))
    logging.shutdown()
    # Threads of the process groups may still wait for ranks that have gone.
    os._exit(status)
