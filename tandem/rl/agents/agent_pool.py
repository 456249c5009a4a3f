"""The agent pool: runs the episodes of an agent in separate processes, so that one that hangs or dies costs only its sample."""

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.agent import AgentConfig
from tandem.rl.agents.agent_worker import AgentAnswer, AgentRequest
from tandem.rl.function_pool import FunctionPool, Program
from tandem.rl.function_process import CallDied, CallHung
from tandem.runtime.rpc.calls import message_from, message_meta
from tandem.runtime.traces.spans import span
from tandem.types import Prompt, Sample, UserError
from tandem.types.one_line import describe

if TYPE_CHECKING:  # They need torch, and the check before a run has none.
    from tandem.rl.agents.agent_server import AgentServer
    from tandem.rl.agents.session import Session

logger = logging.getLogger(__name__)
ATTEMPTS = 2
"""Worker processes that may end during one episode: the second time the episode is to blame."""


class AgentPool:
    """``config.workers`` processes that run the agent against ``server``. Their output goes to ``log_dir/agent-worker-N.log``.

    The constructor loads the agent and raises ``UserError`` if it cannot be loaded.
    """

    def __init__(self, config: AgentConfig, server: "AgentServer | None", log_dir: Path | None = None) -> None:
        """``server``: ``None`` to see whether the agent loads."""
        self._config, self._server = config, server
        deadline = (config.start_deadline_s, "rollout.agent.start_deadline_s")
        program = Program("the agent was", "agent-worker", "tandem.rl.agents.agent_worker", ["--agent", config.function], *deadline)
        self._keys = [f"sk-tandem-{secrets.token_hex(16)}" for _ in range(config.workers)]
        url = server.url if server is not None else "http://127.0.0.1:9"
        self._pool = FunctionPool(program, config.workers, log_dir, [_environment(url, key) for key in self._keys])

    def run(self, begin: "Callable[[], Session]") -> "Future[Sample]":
        """Starts an episode in the session that ``begin`` makes, which is called again where a process ended."""
        return self._pool.run(lambda number: self._traced(number, begin))

    @property
    def columns(self) -> list[str]:
        """Returns the columns of a prompt that the agent cannot do without."""
        return self._pool.columns

    def close(self) -> None:
        """Terminates every process with its child processes."""
        self._pool.close()

    def _traced(self, number: int, begin: "Callable[[], Session]") -> Sample:
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": self._config.function}
        with span("invoke_agent", attributes, "client") as opened:
            sample = self._sample(number, begin)
            if opened is not None:
                opened.update({"tandem.sample": sample.id, "gen_ai.response.finish_reason": sample.finish_reason.value})
                opened.error = sample.fault
            return sample

    def _sample(self, number: int, begin: "Callable[[], Session]") -> Sample:
        assert self._server is not None
        log, key = self._pool.logs[number].name, self._keys[number]
        for attempt in range(ATTEMPTS):
            session = begin()
            self._server.bind(key, session)
            try:
                request = AgentRequest(session.prompt.question, session.seed, _columns(session.prompt))
                answer = message_from(AgentAnswer, self._pool.call(number, "run", message_meta(request), self._config.timeout_s))
                fault = f"agent '{self._config.function}': {answer.error}" if answer.error else ""
                self._server.unbind(key)
                return session.sample(answer.text if answer.has_text else None, fault, answer.outcome)
            except CallHung:
                logger.warning("%s: episode %s hung and was ended", log, session.name)
                fault = f"agent '{self._config.function}': no answer within rollout.agent.timeout_s ({self._config.timeout_s:g} s), and its process was ended"
                break
            except CallDied as death:
                logger.warning("%s: episode %s ended its process (%s)", log, session.name, death)
                fault = f"agent '{self._config.function}': its process ended {attempt + 1} times ({death})"
            except UserError as error:  # The process cannot be replaced.
                fault = describe(error)
                break
            finally:
                self._server.unbind(key)
        return session.sample(None, fault)


def _columns(prompt: Prompt) -> dict[str, Any]:
    """Returns what an agent may take besides the question."""
    return {"messages": list(prompt.messages), "ground_truth": prompt.ground_truth, **prompt.columns}


def _environment(url: str, key: str) -> dict[str, str]:
    """Returns the variables from which the libraries of OpenAI and Anthropic take the address and the key."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key,
        "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip
