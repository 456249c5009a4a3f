"""A small server that speaks the API of the Hugging Face Hub: model information, file trees, and files with ETags, commits and ranges."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """A model. ``revisions``: the commit of each branch and tag; ``commits``: the files of each commit. ``token``: needed to see it, as for a private
    model. A file of the Hub is large if its name ends in ``.safetensors`` or ``.bin``."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def commit(self, files: dict[str, bytes], *names: str) -> str:
        """Adds a commit to which the branch ``main`` and ``names`` point, and returns it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.revisions |= dict.fromkeys(("main", *names), commit)
        return commit


@dataclass
class Hub:
    """``requests``: method, path and Range header of each request. ``cuts``: for each file the number of bytes after which its next answers break off."""

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    cuts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, folder: Path, **options: Any) -> str:
        """Adds the files of ``folder`` as a model, and returns its commit."""
        repo = self.repos.setdefault(name, Repo(**options))
        return repo.commit({path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()})

    def downloads(self) -> list[str]:
        """Returns the names of the files that were sent, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Runs the server on a free port in this process."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repo = self.hub.repos.get(match[1]) if match else None
        if repo is None or (repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}"):
            # The Hub does not tell a private model from one that does not exist.
            self._refuse(401, "RepoNotFound", "Repository not found", with_body)
            return
        assert match is not None
        if repo.gated:
            self._refuse(403, "GatedRepo", "Access to this model is restricted", with_body)
            return
        given = (api[3] or "main") if api else match[2]
        commit = repo.revisions.get(given, given)
        files = repo.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {given}", with_body)
        elif api and api[2] == "tree":
            self._json([_entry(name, content) for name, content in files.items()], with_body)
        elif api:
            blobs = parse_qs(url.query).get("blobs") == ["true"] or "blobs=True" in url.query
            siblings = [{"rfilename": name} | ({"size": len(content), "blobId": git_digest(content)} if blobs else {}) for name, content in files.items()]
            self._json({"id": match[1], "modelId": match[1], "sha": commit, "private": repo.token is not None, "tags": [], "siblings": siblings}, with_body)
        elif match[3] not in files:
            self._refuse(404, "EntryNotFound", "Entry not found", with_body, {"X-Repo-Commit": commit})
        else:
            self._file(match[3], files[match[3]], commit, with_body)

    def _file(self, name: str, content: bytes, commit: str, with_body: bool) -> None:
        is_large = name.endswith((".safetensors", ".bin"))
        etag = hashlib.sha256(content).hexdigest() if is_large else git_digest(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_large:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(begin[1]) if begin else 0
        if begin:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        self._begin(206 if begin else 200, len(body), headers)
        if not with_body:
            return
        if cuts := self.hub.cuts.get(name):
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _json(self, content: Any, with_body: bool) -> None:
        body = json.dumps(content).encode()
        self._begin(200, len(body), {"Content-Type": "application/json"})
        if with_body:
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str, with_body: bool, headers: dict[str, str] | None = None) -> None:
        body = json.dumps({"error": message}).encode()
        self._begin(status, len(body), {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json", **(headers or {})})
        if with_body:
            self.wfile.write(body)

    def _begin(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _entry(name: str, content: bytes) -> dict[str, Any]:
    large = {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}
    is_large = name.endswith((".safetensors", ".bin"))
    return {"type": "file", "path": name, "size": len(content), "oid": git_digest(content)} | (large if is_large else {})
