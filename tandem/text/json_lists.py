"""Tool calls that a model writes as a JSON list behind a mark: Phi-4-mini, Granite and Command A."""

from collections.abc import Callable

from tandem.text.answer_events import Unreadable
from tandem.text.json_call import json_object
from tandem.text.pieces import Pieces, Steps
from tandem.text.written_calls import ToolCall


def json_list(*starts: str, end: str = "") -> Callable[[Pieces, object], Steps[None]]:
    """Returns a reader of lists behind one of the marks ``starts``, before the mark ``end`` where there is one. The opening bracket may be part of a mark."""
    ends = (end,) if end else ()

    def read(source: Pieces, schemas: object) -> Steps[None]:
        mark = yield from source.pass_until(*starts)
        while mark:
            is_list = mark.endswith("[") or (yield from source.begins_with("["))
            while is_list and (yield from source.begins_with("{", is_taken=False)):
                yield from json_object(source)
                yield from source.begins_with(",")
            following = ""
            if not (is_list and (yield from source.begins_with("]"))):
                written, following = yield from source.until(*ends, *starts)
                if not is_list or written.strip():
                    yield Unreadable(("" if is_list else mark) + written, ToolCall(problem="the calls are not a JSON list"))
            elif end:
                yield from source.begins_with(end)
            mark = following if following in starts else (yield from source.pass_until(*starts, is_trimmed=True))

    return read
