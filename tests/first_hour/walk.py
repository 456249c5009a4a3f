"""Walks through the documents as a new user: runs every code block, word for word and in order, in one folder and one environment.

    python tests/first_hour/walk.py                        every document in a fresh clone, which sets up its own environment
    python tests/first_hour/walk.py docs/tutorial.md       some documents, after the README

The Hub is a server of this machine, on which models of a few thousand parameters have the names that the documents use. ``make test`` is left out, because this
is one of its tests. Ends with exit code 1 at the first block that does not do what it should.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

# isort: split

from code_blocks import PLAIN, SHELL, STEPS, Block, code_blocks
from hub_server import hub_server

from tandem.config.load import build
from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "tutorial", "how-to/from-vllm", "inference", "recipes", "serving", "pretraining", "training", "rl", "hybrid", "cluster", "cluster/topologies", "planner",
    "planner/serving", "health", "reliability", "observability", "dashboard", "trackers",
)  # fmt: skip
"""Of ``docs``, those with blocks that are run, in an order in which each finds what it names."""
MODELS = ("Qwen/Qwen3-0.6B",)
"""The models of the Hub in the documents."""
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2}
TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
BLOCK_LIMIT_S = 900
SERVER_START_S = 120


class Stumble(Exception):
    """A block that did not do what its document says."""


class Walker:
    """Runs the blocks of documents in ``folder``. What a shell block exports is there for the blocks after it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)

    def walk(self, document: Path) -> None:
        """Runs every block of ``document``; ends the servers that it started. Raises ``Stumble``."""
        with ExitStack() as servers:
            for block in code_blocks(document):
                print(f"--- {block} {block.language} {block.how}", flush=True)
                how, _, rest = block.how.partition(" ")
                if how == "file":
                    path = self._folder / rest
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text, encoding="utf-8")
                elif how == "server":
                    servers.enter_context(self._server(block, int(rest)))
                elif how != "no," and block.language in SHELL:
                    self._shell(block)
                elif how != "no," and block.language == "python":
                    self._python(block)
                elif how != "no," and block.language not in (*PLAIN, "yaml"):
                    raise Stumble(f"{block}: blocks of '{block.language}' are not known")

    def _shell(self, block: Block) -> None:
        lines = [line for line in block.text.splitlines() if not line.startswith("make test")]
        if block.how == "short":
            lines = [re.sub(r"^(tandem train \S+)", rf"\1 --run.max_steps={STEPS}", line) for line in lines]
        with tempfile.NamedTemporaryFile() as variables:
            self._run(block, ["bash", "-eo", "pipefail", "-c", "\n".join([*lines, f"env -0 > {variables.name}"])])
            exported = Path(variables.name).read_text(encoding="utf-8")
        self._environment = dict(entry.split("=", 1) for entry in exported.split("\0") if entry)

    def _python(self, block: Block) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program.py"
            program.write_text(block.text, encoding="utf-8")
            self._run(block, ["python", str(program)])

    def _run(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self._folder, env=self._environment, timeout=BLOCK_LIMIT_S, capture_output=True, text=True, errors="replace")
        print(done.stdout, done.stderr, sep="", flush=True)
        # curl succeeds with an answer that is an error.
        refused = "curl " in block.text and '"error"' in done.stdout
        if done.returncode != 0 or refused or "Traceback" in done.stdout + done.stderr:
            raise Stumble(f"{block}: exit status {done.returncode}\n{block.text}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")

    @contextmanager
    def _server(self, block: Block, port: int) -> Iterator[None]:
        with tempfile.TemporaryFile("w+") as output:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {block.text.strip()}"], cwd=self._folder, env=self._environment, stdout=output, stderr=subprocess.STDOUT, text=True
            )
            try:
                end = time.monotonic() + SERVER_START_S
                while not _serves(port):
                    if server.poll() is not None or time.monotonic() > end:
                        output.seek(0)
                        raise Stumble(f"{block}: nothing serves on port {port}\n{output.read()}")
                    time.sleep(0.2)
                yield
                server.send_signal(signal.SIGINT)
                if server.wait(60) != 0:
                    raise Stumble(f"{block}: exit status {server.returncode} after Ctrl-C")
            finally:
                server.kill()
                server.wait()


def _serves(port: int) -> bool:
    try:
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200)
    except OSError:
        return False


def fresh_environment() -> dict[str, str]:
    """Returns the variables of a login without an activated environment; those that say where packages come from are kept."""
    kept = ("HOME", "LANG", "PIP_CERT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_ARGS", "SSL_CERT_FILE")
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if not (Path(part) / "activate").exists())
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PATH": path, "TERM": "dumb", "COLUMNS": "100"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, default=[Path(f"docs/{name}.md") for name in DOCUMENTS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder, hub_server() as hub:
        clone = Path(folder) / "tandem"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        create_model(build(NewModelConfig, SHAPE), 0, Path(folder) / "model")
        (Path(folder) / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        for name in MODELS:
            hub.add(name, Path(folder) / "model")
        walker = Walker(clone, {**fresh_environment(), "HF_ENDPOINT": hub.url, "HF_HOME": str(Path(folder) / "huggingface")})
        try:
            for document in (Path("README.md"), *options.documents):
                walker.walk(clone / document)
        except Stumble as stumble:
            print(stumble, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
