"""When a run saves: by steps, by minutes, and on request."""

import os
import signal

from tandem.config.checkpoint import CheckpointConfig
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.trainer.checkpoint.trigger import CheckpointTrigger


def test_minutes_without_a_checkpoint_ask_for_one_and_count_anew_after_it() -> None:
    now = [1000.0]
    times = CheckpointTrigger(CheckpointConfig(every_steps=100, every_minutes=2), SignalRequests(), clock=lambda: now[0])
    for seconds, wanted in ((0.0, "nothing"), (119.0, "nothing"), (120.0, "save"), (130.0, "save")):
        now[0] = 1000.0 + seconds
        assert times.due(7) == wanted
    times.saved()
    assert times.due(8) == "nothing" and times.due(200) == "save"
    now[0] += 120
    assert times.due(9) == "save"
    never = CheckpointTrigger(CheckpointConfig(every_steps=100), SignalRequests(), clock=lambda: now[0])
    now[0] += 10**9
    assert never.due(9) == "nothing"


def test_signals_ask_for_a_save_once_and_for_the_end_with_a_line_and_are_given_back() -> None:
    heard: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    with SignalRequests(heard.append) as requests:
        times = CheckpointTrigger(CheckpointConfig(every_steps=100), requests)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert times.due(3) == "save"
        times.saved()
        assert times.due(4) == "nothing" and heard == []
        os.kill(os.getpid(), signal.SIGINT)
        assert times.due(5) == "stop" and len(heard) == 1 and "saved first" in heard[0]
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            heard.append("interrupted")
    assert heard[1:] == ["interrupted"]
    assert {number: signal.getsignal(number) for number in before} == before
