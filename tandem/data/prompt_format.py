"""How a task's instance becomes the text that the model reads: the prompt template, or the tokenizer's chat template."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tandem.config.task import TaskConfig
from tandem.config.unread import refuse_unread
from tandem.data.examples import BrokenExample, Example
from tandem.data.tasks import TaskItem
from tandem.data.tokenizing.encode_examples import ExampleEncoder
from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

Encode = Callable[[str], Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


class ChatFormat(NamedTuple):
    """``render``: messages and tools to the text of the tokenizer's chat template, up to where the answer begins. ``encode``: that text to token ids,
    without the special tokens that the template writes itself. ``encode_whole``: a conversation and tools to token ids, and for each 1 if the assistant wrote
    it, else 0. ``tools``: those of the recipe, which every conversation has."""

    render: Callable[[Messages, Sequence[Mapping[str, Any]]], str]
    encode: Encode
    encode_whole: Callable[[Messages, Sequence[Mapping[str, Any]]], tuple[list[int], list[int]]]
    tools: Sequence[Mapping[str, Any]] = ()


class PromptFormat:
    """The format of a task's prompts. ``encode``: of a text that ``render`` returns. Raises ``UserError`` where keys of the task do not fit prompts that
    are messages (``has_messages``), or texts."""

    def __init__(self, config: TaskConfig, encode: Encode, chat_format: ChatFormat | None, has_messages: bool) -> None:
        self.is_chat = has_messages if config.chat is None else config.chat
        if self.is_chat and chat_format is None:
            raise UserError("'task.chat' is true, but the tokenizer has no chat template; set it to false or use a chat model")
        if config.tools and not self.is_chat:
            raise UserError("'task.tools' is given and the prompts are texts; the chat template shows tools: set task.chat to true")
        if has_messages and not self.is_chat:
            raise UserError("'task.chat' is false and the prompts are messages, which only the chat template formats; leave task.chat out")
        if has_messages:
            refuse_unread("task", config, "the prompts are messages, which the chat template formats", "prompt_template")
        if config.system_prompt and not self.is_chat:
            raise UserError("'task.system_prompt' is given and the prompts are texts; set task.chat to true or put it in task.prompt_template")
        self._config, self._chat_format = config, chat_format
        self.encode = chat_format.encode if self.is_chat and chat_format is not None else encode

    def render(self, item: TaskItem) -> str:
        """Returns the text that the model reads. Raises ``UserError`` with the item's place where the chat template refuses it."""
        if not self.is_chat:
            return self._filled(item)
        assert self._chat_format is not None
        try:
            return self._chat_format.render(self._messages(item), self._chat_format.tools or item.tools)
        except UserError as error:
            raise UserError(f"{item.where}: {error}") from None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools that every prompt shows."""
        return self._chat_format.tools if self._chat_format is not None else ()

    def encode_whole(self, item: TaskItem, turns: Messages) -> tuple[list[int], list[int]]:
        """Returns the token ids of the conversation of ``item`` and the ``turns`` after it, and for each 1 if the assistant wrote it, else 0. Raises
        ``UserError`` with the item's place where the chat template refuses it."""
        assert self._chat_format is not None
        try:
            return self._chat_format.encode_whole([*self._messages(item), *turns], self._chat_format.tools or item.tools)
        except (UserError, BrokenExample) as error:
            raise UserError(f"{item.where}: {error}") from None

    def _filled(self, item: TaskItem) -> str:
        # Not str.format, because a prompt or template may contain braces.
        return self._config.prompt_template.replace("{prompt}", item.text)

    def _messages(self, item: TaskItem) -> list[Mapping[str, Any]]:
        messages: list[Mapping[str, Any]] = list(item.messages) or [{"role": "user", "content": self._filled(item)}]
        if self._config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return messages


def text_encode(tokenizer: Tokenizer) -> Encode:
    """Returns the encoder of texts, with the special tokens that the model expects first."""
    return lambda text: tokenizer.encode(text, add_special_tokens=True)


def chat_format_of(folder: Path, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> ChatFormat:
    """Returns the format of chat prompts of the tokenizer in ``folder``. Its template is read with the first prompt, which raises ``UserError`` without
    one; the template adds its own special tokens. ``tools``: those of the recipe."""
    examples = ExampleEncoder(folder, tokenizer.backend, None)

    @cache
    def template(with_tools: bool) -> ChatTemplate:
        # The current date would make the prompts differ from one day to the next.
        return ChatTemplate.from_folder(folder, with_tools, knows_today=False)

    def render(messages: Messages, shown: Sequence[Mapping[str, Any]]) -> str:
        compiled = template(bool(shown))
        text = compiled.render(messages, tools=shown or None)
        if not tools:
            # Those of a recipe may be in its own words, for a template that knows none.
            compiled.check_tools(shown)
        return text

    return ChatFormat(
        render,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda messages, shown: examples.encode([examples.render(Example(messages=tuple(messages), tools=tuple(shown)))])[0],
        tools,
    )
