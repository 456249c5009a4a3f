"""A backend that computes nothing, for ``gateway.py``: it answers chat completions of 16 tokens, whole or one event at a time.

    python benchmarks/gateway_stub.py SECONDS_BETWEEN_TOKENS      prints its port
"""

import asyncio
import json
import sys

TOKENS = 16
_USAGE = {"prompt_tokens": 32, "completion_tokens": TOKENS, "total_tokens": 32 + TOKENS}
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}


def _framed(content: dict[str, object], status: str = "200 OK") -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(token: int) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": f"word{token} "}, "finish_reason": "length" if token == TOKENS - 1 else None}
    return _chunk(b"data: %s\n\n" % json.dumps({**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode())


WHOLE = _framed({
    **_HEAD, "object": "chat.completion", "usage": _USAGE,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "".join(f"word{i} " for i in range(TOKENS))}, "finish_reason": "length"}],
})  # fmt: skip
MODELS = _framed({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "stub"}], "model_path": "m", "status": "ready"})
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [_event(token) for token in range(TOKENS)]
EVENTS[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection. Requests are not pipelined."""

    between_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data = transport, b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        end = self.data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.data[:end].lower()
        start = head.find(b"content-length:")
        length = 0 if start < 0 else int(head[start + 15 :].split(b"\r\n")[0])
        if len(self.data) < end + 4 + length:
            return
        body, self.data = self.data[end + 4 :], b""
        if not head.startswith(b"post"):
            self.transport.write(MODELS)
        elif b'"stream": true' in body or b'"stream":true' in body:
            self.transport.write(HEAD)
            self.send(0)
        else:
            self.transport.write(WHOLE)

    def send(self, token: int) -> None:
        while token < TOKENS and not self.transport.is_closing():
            self.transport.write(EVENTS[token])
            token += 1
            if self.between_s and token < TOKENS:
                asyncio.get_running_loop().call_later(self.between_s, self.send, token)
                return


async def main(between_s: float) -> None:
    Stub.between_s = between_s
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
