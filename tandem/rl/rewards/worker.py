"""A reward worker: a process that loads the judges once and answers one call after another. Imports no torch.

Started by ``tandem.rl.rewards.worker_process`` with the number of its socket. Whatever the judges print goes to the
worker's log; standard input is empty for them.
"""

import os
import socket
import sys
import traceback
from typing import Any

from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judgement import Judge, describe
from tandem.rl.rewards.messages import encode_message, items_from_json, judgements_to_json, receive_message
from tandem.rl.rewards.rule_based import make_judge
from tandem.types import UserError


def main(descriptor: int) -> None:
    """Serve until the pool closes its side."""
    with socket.socket(fileno=descriptor) as channel:
        channel.set_inheritable(False)
        setup = receive_message(channel)
        if setup is None:
            return
        try:
            config = build(RewardsConfig, setup["config"])
            judges = [make_judge(function, config) for function in config.composition]
        except UserError as error:
            traceback.print_exc()
            channel.sendall(encode_message({"error": str(error)}))
            return
        channel.sendall(
            encode_message({"batched": [judge.batched for judge in judges], "reads_ids": [judge.reads_ids for judge in judges]})
        )
        while (request := receive_message(channel)) is not None:
            channel.sendall(encode_message(_answer(judges, request)))


def _answer(judges: list[Judge], request: dict[str, Any]) -> dict[str, Any]:
    items = items_from_json(request["items"])
    try:
        return {"judgements": judgements_to_json(judges[request["judge"]].judge(items))}
    except BaseException as error:  # SystemExit too: it is the function that gave up, not the worker
        traceback.print_exc()
        sys.stderr.flush()
        return {"error": describe(error)}


if __name__ == "__main__":
    # Standard input is empty already; standard output joins standard error, which is the worker's log.
    os.dup2(2, 1)
    main(int(sys.argv[1]))
