"""What stands between a turn that a model sampled and its next one: the end of the turn, the tools' results and the opening of the answer, as the
chat template writes them.

The tokens that were sampled are never encoded again. The text between is found by rendering a short conversation with a mark in the assistant's
turn: everything after the mark and the end of that turn follows what the model sampled, the separator after the end token included. It does not
depend on the conversation before it, so a template that removes reasoning from earlier turns removes nothing here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from tandem.text.chat import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

Role = Literal["tool", "user"]
Message = dict[str, Any]

_TURN, _RESULT = "MARKOFTHETURN", "MARKOFTHERESULT"
_QUESTION: Message = {"role": "user", "content": "."}


class Call(NamedTuple):
    """What a template may show of a call next to its result. ``id``: nine letters or digits, as Mistral's templates require."""

    name: str
    id: str


class _Form(NamedTuple):
    """How the assistant's turn is written: ``content`` alone, or calls whose arguments are a ``mapping`` or a JSON ``text``, beside ``content``; of several
    calls at once only the first where ``is_single``."""

    kind: Literal["mapping", "text", "content"]
    content: str | None = ""
    is_single: bool = False


_WITH_CALLS = [_Form(kind, content) for kind in ("mapping", "text") for content in ("", None)]  # type: ignore[arg-type]
_FORMS = (*_WITH_CALLS, *(form._replace(is_single=True) for form in _WITH_CALLS), _Form("content"))
_PROBES = [Call("probe", "call00000"), Call("probe", "call00001")]


@dataclass(frozen=True, slots=True)
class ToolTurns:
    """The turns of tools in the conversations of one template and tokenizer. ``role``: the role of a result: ``tool``, or ``user`` for a template that
    knows no tools. ``ends``: the text of each token that ends a completion, by id. ``variables`` reach the template. ``forms``: how a turn with one call is
    written, and one with several."""

    template: ChatTemplate
    tokenizer: Tokenizer
    role: Role
    ends: Mapping[int, str]
    variables: Mapping[str, Any]
    forms: tuple[_Form, _Form] = (_FORMS[-1], _FORMS[-1])

    @classmethod
    def make(cls, template: ChatTemplate, tokenizer: Tokenizer, role: Role = "tool", **variables: Any) -> "ToolTurns":
        """Raises ``UserError`` where the tokenizer names no end token, or the template does not show the results of tools."""
        ends = {token: tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_token_ids}
        if not ends:
            raise UserError(f"the tokenizer in '{template.folder}' has no end-of-sequence token, which ends the turns of an episode; name it in its settings")
        turns = cls(template, tokenizer, role, ends, variables)
        return replace(turns, forms=(turns._form(_PROBES[:1]), turns._form(_PROBES)))

    @classmethod
    def of_agent(cls, template: ChatTemplate, tokenizer: Tokenizer) -> "ToolTurns":
        """Returns the turns of conversations whose messages an agent writes: also of a template that does not show results, where a turn with calls
        has no known form. Raises ``UserError`` where the tokenizer names no end token."""
        try:
            return cls.make(template, tokenizer)
        except UserError:
            return cls.make(template, tokenizer, "user")

    def between(self, calls: Sequence[Call], results: Sequence[str], last_token: int | None) -> list[int]:
        """Returns the token ids between a turn that made ``calls`` and the next one, which has their ``results``. ``last_token``: the last token of the
        turn; where it is no end token (the turn ended at a stop text), the end of the turn is among the returned ids."""
        return self.following(calls, list(self._results(calls, results)), last_token)

    def following(self, calls: Sequence[Call], messages: Sequence[Mapping[str, Any]], last_token: int | None) -> list[int]:
        """Returns the token ids between a turn that made ``calls``, or none, and the next one, before which ``messages`` come. ``last_token``: as in
        ``between``. Raises ``UserError`` where the template does not show them after such a turn."""
        tail, own = self._rendered(calls, messages)
        place, end = min(((tail.find(text), text) for text in self.ends.values() if text in tail), default=(-1, ""))
        sampled = self.ends.get(-1 if last_token is None else last_token)
        if not calls and (written := self._first_token(tail)) not in ("", end):
            # The template ends the turns of a conversation with another token than the model does.
            after = tail.partition(written)[2]
            return self._encode("", written + after) if sampled is None else self._encode(sampled, after)
        if not end:
            raise UserError(f"the chat template of '{self.template.folder}' ends this turn with none of the tokens that end a completion")
        after = tail[place + len(end) :]
        if sampled is None or (sampled != end and end not in own):
            # Nothing that the model sampled is this token: it opens the next turn, or closes one that a stop text ended.
            return self._encode(sampled or "", end + after)
        return self._encode(sampled, after)

    def _first_token(self, text: str) -> str:
        """Returns the text of the added token that ``text`` begins with, after spaces; empty without one."""
        added = (token.content for token in self.tokenizer.backend.get_added_tokens_decoder().values())
        return max((token for token in added if text.lstrip().startswith(token)), key=len, default="")

    def _encode(self, before: str, text: str) -> list[int]:
        """Returns the ids of ``text`` after the special token ``before``: a tokenizer may treat the beginning of a text in its own way."""
        if not before:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode(before + text)[1:]

    def _form(self, calls: Sequence[Call]) -> _Form:
        """Returns the first form in which the template shows ``calls`` and their results. Raises ``UserError`` without one."""
        problems = []
        for form in _FORMS if self.role == "tool" else _FORMS[-1:]:
            turn = self._turn(calls, form)
            try:
                text = self._render([_QUESTION, turn, *self._results(calls, [_RESULT] * len(calls))], True)
                is_shown = _RESULT in text and _TURN in text and _TURN in self._render([_QUESTION, turn], False)
                if is_shown and any(end in text.partition(_TURN)[2] for end in self.ends.values()):
                    return form
                problems.append(
                    f"it ends the assistant's turn with none of the tokens that end a completion, {', '.join(self.ends.values())}: name the right ones as "
                    "eos_token_id in generation_config.json" if is_shown else "it does not show the content of messages with the role 'tool'"
                )
            except UserError as error:
                problems.append(str(error))
        fix = "set rollout.multi_turn.observation_role to user" if self.role == "tool" else "use another model"
        raise UserError(f"the chat template of '{self.template.folder}' cannot show the results of tools ({problems[0]}); {fix}")

    def _rendered(self, calls: Sequence[Call], messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Returns what follows the mark in the assistant's turn: with ``messages`` and the opening of the next turn, and in that turn alone."""
        turn = self._turn(calls, self.forms[len(calls) > 1] if calls else _FORMS[-1])
        text, own = self._render([_QUESTION, turn, *messages], True), self._render([_QUESTION, turn], False)
        return text.partition(_TURN)[2], own.partition(_TURN)[2]

    def _render(self, messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
        return self.template.render(messages, add_generation_prompt=opens, **self.variables)

    def _turn(self, calls: Sequence[Call], form: _Form) -> Message:
        if form.kind == "content":
            return {"role": "assistant", "content": _TURN}
        chosen = calls[:1] if form.is_single else calls
        functions = []
        for number, call in enumerate(chosen, start=1):
            # The last call alone has the mark, so that what follows it is what follows the turn.
            arguments = {"mark": _TURN if number == len(chosen) else ""}
            given = arguments if form.kind == "mapping" else json.dumps(arguments)
            functions.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}})
        return {"role": "assistant", "content": form.content, "tool_calls": functions}

    def _results(self, calls: Sequence[Call], results: Sequence[str]) -> Iterator[Message]:
        if self.role == "user":
            yield {"role": "user", "content": "\n".join(results)}
            return
        for call, result in zip(calls, results, strict=True):
            yield {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
