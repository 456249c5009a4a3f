"""Server-sent events as bytes (WHATWG HTML, section 9.2): where one ends."""


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Returns the events of ``data`` that are whole, and the rest: the beginning of the next one."""
    if data.endswith(b"\n\n"):
        return data, b""
    end = max(data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0, data.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)
    return data[:end], data[end:]
