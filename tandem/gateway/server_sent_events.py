"""Server-sent events as bytes (WHATWG HTML, section 9.2): where one ends."""


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Returns the events of ``data`` that are whole, and the rest: the beginning of the next one."""
    if data.endswith(b"\n\n"):
        return data, b""
    end = max(data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0, data.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)
    return data[:end], data[end:]


class EventParts:
    """The bytes of a stream until an event is whole. ``size``: of what is not whole yet. Each byte is looked at
    once, as an event may come in thousands of parts."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._end = b""
        self.size = 0

    def add(self, part: bytes) -> bytes:
        """Takes the next bytes; returns the events that are whole now."""
        seam = self._end + part
        if b"\n\n" not in seam and b"\r\n\r\n" not in seam:
            self._parts.append(part)
            self.size, self._end = self.size + len(part), seam[-3:]
            return b""
        whole, held = whole_events(b"".join((*self._parts, part)) if self._parts else part)
        self._parts = [held] if held else []
        self.size, self._end = len(held), held[-3:]
        return whole
