"""What an answer consists of, as events in the order in which a model writes them."""

from typing import NamedTuple

from tandem.text.written_calls import ToolCall


class Reasoning(NamedTuple):
    """Further text of the reasoning before the answer."""

    text: str


class Content(NamedTuple):
    """Further text of the answer."""

    text: str


class CallBegun(NamedTuple):
    """A call of the tool ``name`` begins. ``id``: the model's own name of the call, empty if it wrote none."""

    name: str
    id: str = ""


class CallArguments(NamedTuple):
    """Further text of the JSON object with the arguments of the call that was begun."""

    text: str


class CallEnded(NamedTuple):
    """The call that was begun ends. ``call``: the whole of it, with a ``problem`` if its arguments cannot be read."""

    call: ToolCall


class Unreadable(NamedTuple):
    """A call of which no name can be read. ``written``: its text. ``call``: with the ``problem``."""

    written: str
    call: ToolCall


Event = Reasoning | Content | CallBegun | CallArguments | CallEnded | Unreadable
