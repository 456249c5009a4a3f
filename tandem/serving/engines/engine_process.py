"""The process of one engine: ``python -m tandem.serving.engines.engine_process --channel FD ARGUMENTS``.

``ARGUMENTS`` is a JSON object, the fields of ``EngineArgs``. The process ends when the server closes the channel.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading

import torch

from tandem.config.engine import EngineArgs
from tandem.config.load import build
from tandem.engine.llm import LLM
from tandem.kernels import BLOCK_TOKENS
from tandem.layout.parameters import parameter_count
from tandem.runtime.rpc.calls import error_meta, message_meta
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.serving.engines.engine_loop import EngineLoop
from tandem.serving.engines.messages import EngineInfo
from tandem.types import WeightVersion


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--weight-version", type=int, nargs=2)
    parser.add_argument("arguments", type=lambda text: build(EngineArgs, json.loads(text), "engine"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s engine[%(process)d] %(message)s")
    # A terminal's Ctrl-C reaches the whole group: the server decides when its engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(options.threads)
    connection = socket.socket(fileno=options.channel)
    connection.set_inheritable(False)
    with contextlib.closing(Channel(connection)) as server:
        serve(server, options.arguments, WeightVersion(*options.weight_version) if options.weight_version else None)


def serve(server: Channel, args: EngineArgs, weights: WeightVersion | None) -> None:
    """Loads the model, whose weights are called ``weights``, says what it is, and serves until the channel is closed."""
    try:
        llm = LLM.from_engine_args(args, digest_weights=True, weight_version=weights)
    except Exception as error:
        with contextlib.suppress(OSError):
            server.send(error_meta(error), kind="error", method="load")
        return
    loop = EngineLoop(llm, server)
    threading.Thread(target=_receive, args=(server, loop), name="inbox", daemon=True).start()
    try:
        server.send(message_meta(_info(llm)), kind="result", method="load")
        loop.run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)


def _receive(server: Channel, loop: EngineLoop) -> None:
    with contextlib.suppress(EOFError, OSError, BrokenFrame):
        while True:
            frame = server.receive()
            if frame.method == "ping":
                server.send({"working_s": loop.working_s}, kind="event", method="pong")
            else:
                loop.inbox.put(frame)
    loop.inbox.put(None)


def _info(llm: LLM) -> EngineInfo:
    settings, shapes = llm.engine.settings, llm.engine.shapes
    return EngineInfo(
        pid=os.getpid(),
        max_model_len=settings.max_model_len,
        vocab_size=shapes.vocab_size,
        num_blocks=settings.num_blocks,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=settings.enable_prefix_caching,
        num_parameters=parameter_count(shapes),
        dtype=str(llm.engine.dtype).removeprefix("torch."),
        tokenizer_folder=None if llm.engine.tokenizer is None else str(llm.tokenizer_folder.resolve()),
        model_folder=str(llm.model_folder.resolve()),
    )


if __name__ == "__main__":
    main()
