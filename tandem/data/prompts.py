"""The prompts of a run from a task's instances: rendered, tokenized once, and refused before work begins if they do not fit the context."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tandem.config.prompt_order import PromptOrderConfig
from tandem.config.task import TaskConfig
from tandem.data.prompt_format import ChatFormat, Encode, PromptFormat
from tandem.data.prompt_orders import PromptOrder
from tandem.data.split import Split
from tandem.data.tasks import Task, TaskItem, make_task
from tandem.data.tasks.base import Demonstration
from tandem.text.long_text import exceeds
from tandem.types import Prompt, UserError

TRAIN = "train-"
"""The id of a training prompt is this and its index."""


class EncodedDemonstration(NamedTuple):
    """A tokenized demonstration: the prompt's tokens, then the completion's with the end of sequence. ``learned``: for each token of the completion whether it
    is learned, which the results of tools are not."""

    id: str
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    correct: bool
    learned: tuple[bool, ...]


class PromptSource:
    """The prompts of a run. Every prompt is a function of ``seed`` and its position, so that a resume needs no state.

    ``prompts_per_draw``: of a step, or of a round where steps have up to ``rounds``.

    ``encode``: text to token ids, with the special tokens that the model expects first. ``chat_format``: for prompts that the chat template formats,
    those of a task with messages and all with ``config.chat``. A prompt may have at most ``context_tokens - max_new_tokens`` tokens. A finite task is
    checked as a whole in the constructor. Raises ``UserError``.
    """

    def __init__(
        self,
        config: TaskConfig,
        encode: Encode,
        *,
        seed: int,
        prompts_per_draw: int,
        rounds: int = 1,
        order: PromptOrderConfig | None = None,
        context_tokens: int,
        max_new_tokens: int,
        chat_format: ChatFormat | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.rounds = rounds
        self.context_tokens = context_tokens
        self.max_new_tokens = max_new_tokens
        self._evaluations: dict[tuple[Split, int], list[Prompt]] = {}
        self.task: Task = make_task(config, seed)
        try:
            self._format = PromptFormat(config, encode, chat_format, self.task.has_messages)
            self._encode = self._format.encode
            self.order = PromptOrder(order or PromptOrderConfig(), self.task, seed, prompts_per_draw)
            self._check_all()
        except BaseException:
            self.task.close()
            raise

    @property
    def fingerprint(self) -> str:
        """A digest that changes whenever a prompt of the run would; a resume compares it."""
        order = f" {self.order.config}" if self.order.config != PromptOrderConfig() else ""
        tools = f" {json.dumps(self._format.tools, sort_keys=True)}" if self._format.tools else ""
        return f"{self.task.fingerprint} {self.config.prompt_template!r} {self._format.is_chat} {self.config.system_prompt!r}{order}{tools}"

    def for_step(self, step: int) -> list[Prompt]:
        """Returns the training prompts of ``step`` where each step draws once, before anything was solved."""
        return self.at(self.order.indices(step))

    def after(
        self, passed: int, count: int, taken: Collection[str], success_rates: Mapping[int, float] | None = None
    ) -> tuple[list[Prompt], int]:
        """Returns the next ``count`` training prompts after the first ``passed`` places of their order, without those whose ids are ``taken``, and how many
        places are passed then. ``success_rates``: as in ``PromptOrder.indices``."""
        indices, passed = self.order.after(passed, count, {_index(name) for name in taken}, success_rates)
        return self.at(indices), passed

    def named(self, ids: Sequence[str]) -> list[Prompt]:
        """Returns the training prompts with these ids."""
        return self.at([_index(name) for name in ids])

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Returns the training prompts with ``indices``."""
        return [self.prompt(f"{TRAIN}{index}", self.task.train_prompt(index)) for index in indices]

    def held_out(self, count: int) -> list[Prompt]:
        """Returns the prompts of the evaluations, the same for every step; fewer if the task has fewer."""
        return self._evaluation("held_out", count)

    def fresh(self, count: int) -> list[Prompt]:
        """Returns the prompts of the final accuracy: neither trained on nor seen by an earlier evaluation, unless the task has one
        evaluation file for both."""
        return self._evaluation("final", count)

    def demonstrations(self, seed: int, corrupted_share: float, end_of_sequence: int) -> Iterator[EncodedDemonstration]:
        """Yields the demonstrations of supervised fine-tuning without end; ``corrupted_share`` of them are wrong."""
        index = 0
        while True:
            yield self.demonstration(index, seed, corrupted_share, end_of_sequence)
            index += 1

    def demonstration(self, index: int, seed: int, corrupted_share: float, end_of_sequence: int) -> EncodedDemonstration:
        """Returns demonstration ``index``, determined by the run's seed and ``seed``."""
        shown = self.task.demonstration(index, self.seed * 1_000_003 + seed, corrupted_share)
        prompt = self.prompt(f"demonstration-{index}", shown.item)
        if exceeds(self._encode, shown.completion, self.context_tokens):
            raise UserError(
                f"{shown.item.where}: the answer has {len(shown.completion):,} characters, far more than the context of {self.context_tokens} tokens; "
                "shorten it or raise model.max_length"
            )
        if shown.turns:
            completion, learned = self._encode_turns(prompt, shown)
        else:
            completion = (*self._encode_completion(prompt, shown.completion), end_of_sequence)
            learned = (True,) * len(completion)
        if len(prompt.token_ids) + len(completion) > self.context_tokens:
            raise UserError(
                f"{shown.item.where}: prompt and answer have {len(prompt.token_ids) + len(completion)} tokens, more than the context of "
                f"{self.context_tokens}; shorten it or raise model.max_length"
            )
        return EncodedDemonstration(prompt.id, prompt.token_ids, completion, shown.correct, learned)

    def prompt(self, id: str, item: TaskItem) -> Prompt:
        """Returns ``item`` rendered and tokenized. Raises ``UserError`` with its location if it is empty or too long."""
        text, longest = self._format.render(item), self.context_tokens - self.max_new_tokens
        if exceeds(self._encode, text, longest):
            raise UserError(f"{item.where}: the prompt has {len(text):,} characters, far more than {longest} tokens; shorten it or raise model.max_length")
        token_ids = tuple(self._encode(text))
        if not token_ids:
            raise UserError(f"{item.where}: the prompt has no tokens; give it text that the tokenizer knows")
        if len(token_ids) > longest:
            raise UserError(
                f"{item.where}: the prompt has {len(token_ids)} tokens, more than {longest} (a context of {self.context_tokens} less "
                f"{self.max_new_tokens} new tokens); shorten it, lower rollout.max_tokens or raise model.max_length"
            )
        asked = [str(message["content"]) for message in item.messages if message["role"] == "user"]
        question = asked[-1] if asked else item.text
        return Prompt(id, text, token_ids, item.ground_truth, self.task.name, item.columns, item.messages, question)

    def close(self) -> None:
        """Ends the processes that the task started."""
        self.task.close()

    def _check_all(self) -> None:
        if self.task.size is None:
            self.prompt("check", self.task.train_prompt(0))
            self.held_out(1)
            self.fresh(1)
            return
        self.order.indices(0)
        count = self.order.count
        if self.rounds * count > self.task.size:
            raise UserError(
                f"the task has {self.task.size} training prompts, and a step may draw {self.rounds} x {count} different ones; lower "
                f"algorithm.filter_groups.max_num_gen_batches (to {self.task.size // count} or less) or add prompts"
            )
        for index in range(self.task.size):
            self.prompt("check", self.task.train_prompt(index))
        splits: tuple[Split, ...] = ("held_out", "final")
        for split in splits:
            for item in self.task.eval_prompts(split, self.task.size, self.seed):
                self.prompt("check", item)

    def _evaluation(self, split: Split, count: int) -> list[Prompt]:
        if (split, count) not in self._evaluations:
            items = self.task.eval_prompts(split, count, self.seed)
            name = split.replace("_", "-")
            self._evaluations[split, count] = [self.prompt(f"{name}-{i}", item) for i, item in enumerate(items)]
        return self._evaluations[split, count]

    def _encode_turns(self, prompt: Prompt, shown: Demonstration) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Returns the tokens of an episode after its prompt, up to the last learned one, and which are learned."""
        tokens, learned = self._format.encode_whole(shown.item, shown.turns)
        start = len(prompt.token_ids)
        if tuple(tokens[:start]) != prompt.token_ids or 1 not in learned[start:]:
            raise UserError(f"{shown.item.where}: the chat template writes a conversation with answers differently from its prompt; use another template")
        end = len(learned) - learned[::-1].index(1)
        return tuple(tokens[start:end]), tuple(map(bool, learned[start:end]))

    def _encode_completion(self, prompt: Prompt, completion: str) -> tuple[int, ...]:
        # The completion's tokens are those that the tokenizer adds to the prompt, so that nothing is prepended twice (a
        # beginning-of-sequence token) and the boundary is the same as in rollout.
        whole = tuple(self._encode(prompt.text + completion))
        start = len(prompt.token_ids)
        if whole[:start] != prompt.token_ids:
            raise UserError(
                f"the tokenizer joins the end of prompt {prompt.id} with the beginning of its answer; end 'task.prompt_template' with "
                "a line break or a colon"
            )
        return whole[start:]


def _index(prompt_id: str) -> int:
    """Returns the index of the training prompt with this id."""
    return int(prompt_id.removeprefix(TRAIN))
