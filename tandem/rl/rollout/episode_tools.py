"""What episodes need besides the engine: the tools, the processes that run them, and the template that shows their results. Imports no torch."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tandem.config.multi_turn import MultiTurnConfig
from tandem.data.tools.load import Tool, load_tools
from tandem.data.tools.schema import check_arguments
from tandem.rl.rollout.tool_pool import ToolPool
from tandem.rl.rollout.tool_results import ToolResults
from tandem.rl.rollout.tool_worker import ToolAnswer, error_text
from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls import ToolCall
from tandem.text.tool_turns import ToolTurns

Answer = ToolAnswer | Future[ToolAnswer]


@dataclass(frozen=True, slots=True)
class EpisodeTools:
    """``tools``: those that ``pool`` runs, by name; ``results``: how the model reads what they return."""

    config: MultiTurnConfig
    tools: Mapping[str, Tool]
    pool: ToolPool
    turns: ToolTurns
    results: ToolResults

    @classmethod
    def open(cls, config: MultiTurnConfig, paths: Sequence[str], folder: Path, log_dir: Path | None = None) -> "EpisodeTools":
        """Starts the processes that run the tools at ``paths``. ``folder``: of the tokenizer and its chat template. Raises ``UserError`` where a tool cannot be
        loaded or the template cannot show results."""
        tokenizer, tools = Tokenizer.from_folder(folder), load_tools(paths)
        template = ChatTemplate.from_folder(folder, with_tools=True, knows_today=False)
        turns = ToolTurns.make(template, tokenizer, config.observation_role, tools=[tool.schema for tool in tools.values()])
        results = ToolResults(tokenizer, config.max_tool_response_tokens, config.tool_response_truncate_side)
        return cls(config, tools, ToolPool(paths, config, log_dir=log_dir), turns, results)

    def begin(self, call: ToolCall, id: str = "") -> Answer:
        """Returns the answer to ``call``, which has this ``id`` in its episode: what is wrong with it, or a call of the tool that has begun."""
        tool = self.tools.get(call.name)
        if call.problem:
            return ToolAnswer(error_text(call.problem))
        if tool is None:
            return ToolAnswer(error_text(f"there is no tool '{call.name}'; there are {', '.join(self.tools)}"))
        problem = check_arguments(tool.schema, call.arguments)
        return ToolAnswer(error_text(problem)) if problem else self.pool.run(call.name, call.arguments, id)
