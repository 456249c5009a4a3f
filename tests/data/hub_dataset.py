"""Reads a dataset of a server that speaks the Hub's API, in a process of its own, because the libraries read HF_ENDPOINT when they are imported.

``python hub_dataset.py`` prints a JSON object: what each of several sources gave, rows or the error.
"""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "a" * 40
README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
FILES = {
    "README.md": README.encode(),
    "main/train.jsonl": b"".join(json.dumps({"question": f"q{i}", "answer": f"#### {i}"}).encode() + b"\n" for i in range(5)),
    "main/test.jsonl": b'{"question": "t", "answer": "#### 1"}\n',
}
REPOSITORY = {"id": "me/mine", "sha": SHA, "private": False, "gated": False, "tags": [], "siblings": [{"rfilename": path} for path in FILES]}


class Hub(BaseHTTPRequestHandler):
    """The dataset ``me/mine`` of the Hub. Connections are not kept open, so that nothing answers once the server is closed."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/me/mine/tree/"):
            self.answer(200, json.dumps([{"type": "file", "path": name, "size": len(FILES[name]), "oid": _digest(name)} for name in FILES]).encode())
        elif path.startswith("/api/datasets/me/mine"):
            self.answer(200, json.dumps(REPOSITORY).encode())
        elif path.startswith("/datasets/me/mine/resolve/") and (name := path.split("/", 6)[6]) in FILES:
            self.answer(200, FILES[name], ETag=f'"{_digest(name)}"', **{"X-Repo-Commit": SHA})
        else:
            what = "Entry" if path.startswith("/datasets/me/mine/") else "Repo"
            self.answer(404, b"not found", **{"X-Error-Code": f"{what}NotFound", "X-Error-Message": f"{what} not found", "X-Repo-Commit": SHA})

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"
    from tandem.data.rows.source import Source, read_rows
    from tandem.types import UserError

    def read(**source: str) -> Any:
        try:
            return [row.values for row in read_rows(Source(**source)).rows]
        except UserError as error:
            return str(error)

    given = {
        "train": read(path="me/mine"),
        "test": read(path="hf://datasets/me/mine", subset="main", split="test", revision="main"),
        "split": read(path="me/mine", split="dev"),
        "subset": read(path="me/mine", subset="socratic"),
        "missing": read(path="me/other"),
    }
    server.shutdown()
    server.server_close()
    print(json.dumps({**given, "cached": read(path="me/mine"), "offline": read(path="me/other")}))


if __name__ == "__main__":
    main()
