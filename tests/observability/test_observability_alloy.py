"""The Alloy file that sends logs to Loki: its syntax, and what its stages make of real lines."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import yaml

from tandem.cli.main import main
from tandem.observability.alloy import LABELS, METADATA, alloy_config
from tandem.runtime.records import logs
from tandem.runtime.traces.context import SpanContext
from tandem.runtime.traces.spans import SPANS, begin_first

_TOKEN = re.compile(r'//[^\n]*|(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_][\w.]*)|(?P<mark>[{}\[\],=])|(?P<space>\s+)')


class Alloy:
    """Reads Alloy's syntax (https://grafana.com/docs/alloy/latest/get-started/configuration-syntax/): blocks with labels, attributes, strings, lists, maps and
    references. Blocks are ``(name, label, attributes, blocks)``."""

    def __init__(self, text: str) -> None:
        self.tokens, at = [], 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            assert found is not None, f"no token of Alloy's: {text[at : at + 20]!r}"
            at = found.end()
            if found.lastgroup in ("text", "word", "mark"):
                self.tokens.append(found.group())

    def take(self, wanted: str = "") -> str:
        token = self.tokens.pop(0)
        assert wanted in ("", token), (wanted, token)
        return token

    def body(self) -> tuple[dict[str, Any], list[Any]]:
        attributes: dict[str, Any] = {}
        blocks = []
        while self.tokens and self.tokens[0] != "}":
            name = self.take()
            if self.tokens[0] == "=":
                self.take("=")
                attributes[name] = self.value()
                continue
            label = json.loads(self.take()) if self.tokens[0].startswith('"') else ""
            self.take("{")
            blocks.append((name, label, *self.body()))
            self.take("}")
        return attributes, blocks

    def value(self) -> Any:
        token = self.take()
        if token.startswith('"'):
            return json.loads(token)
        if token == "[":
            return self.several("]", self.value)
        if token == "{":
            return dict(self.several("}", lambda: (self.take(), self.take("="), self.value())[::2]))
        return token

    def several(self, end: str, read: Any) -> list[Any]:
        values = []
        while self.tokens[0] != end:
            values.append(read())
            if self.tokens[0] != end:
                self.take(",")
        self.take(end)
        return values


def stages(line: str, path: str, blocks: list[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the labels and the structured metadata that the stages of ``loki.process`` give a line of the file ``path``."""
    extracted: dict[str, str] = {}
    labels, metadata = {"filename": path}, dict[str, str]()
    for name, _, attributes, _ in blocks:
        if name == "stage.regex":
            matched = re.fullmatch(attributes["expression"], labels[attributes["source"]])
            extracted |= {key: value for key, value in (matched.groupdict() if matched else {}).items() if value}
        elif name == "stage.json":
            said = json.loads(line) if line.startswith("{") else {}
            extracted |= {key: str(said[path]) for key, path in attributes["expressions"].items() if path in said}
        elif name in ("stage.labels", "stage.structured_metadata"):
            into = labels if name == "stage.labels" else metadata
            into |= {key: extracted[source] for key, source in attributes["values"].items() if source in extracted}
        elif name == "stage.label_drop":
            labels = {key: value for key, value in labels.items() if key not in attributes["values"]}
        else:
            assert name == "stage.timestamp" and attributes["format"] == "RFC3339"
    return labels, metadata


def test_lines_get_the_labels_that_loki_keeps_streams_by_and_the_trace_that_grafana_links(tmp_path: Path, quiet_root: None) -> None:
    attributes, blocks = Alloy(alloy_config(tmp_path / "runs", tmp_path / "logs")).body()
    by_name = {(name, label): (own, inside) for name, label, own, inside in blocks}
    assert not attributes and [name for name, *_ in blocks] == ["local.file_match", "loki.source.file", "loki.process", "loki.write"]
    assert by_name["loki.source.file", "tandem"][0] == {"targets": "local.file_match.tandem.targets", "forward_to": ["loki.process.tandem.receiver"]}
    assert by_name["loki.process", "tandem"][0] == {"forward_to": ["loki.write.loki.receiver"]}
    assert by_name["loki.write", "loki"][1][0][2] == {"url": "http://127.0.0.1:3100/loki/api/v1/push"}

    file = logs.setup("trainer_worker", tmp_path / "runs" / "sort" / "logs", rank=1)
    logs.step_is(3)
    with begin_first("step", SpanContext("a" * 32, "b" * 16)):
        logging.getLogger("tandem.x").warning("hello")
    SPANS.take()
    patterns = [target["__path__"] for target in by_name["local.file_match", "tandem"][0]["path_targets"]]
    assert file in Path("/").glob(patterns[0].lstrip("/")) and patterns[1] == f"{tmp_path}/logs/*.log"
    inside = by_name["loki.process", "tandem"][1]
    line = file.read_text().strip()
    labels, metadata = stages(line, str(file), inside)
    assert labels == {"run": "sort", "role": "trainer_worker", "rank": "1", "level": "WARNING"} and set(labels) == set(LABELS)
    assert (metadata["trace_id"], metadata["step"]) == ("a" * 32, "3") and set(metadata) == set(METADATA)
    assert stages("Traceback of a function of the user", str(file.with_name("reward-worker-0.log")), inside) == ({"run": "sort", "role": "reward-worker-0"}, {})
    assert stages("x", f"{file.parent}/pods/n2/etcd.log", inside)[0] == {"run": "sort", "role": "etcd"}
    assert stages("x", f"{tmp_path}/gateway-1.log.2", inside)[0] == {"role": "gateway-1"}

    folders = ["--folder", str(tmp_path / "o"), "--runs-folder", str(tmp_path / "runs"), "--log-folder", str(tmp_path / "logs")]
    assert main(["up", "observability", "--emit", *folders]) == 0
    assert Alloy((tmp_path / "o" / "config.alloy").read_text()).body() == (attributes, blocks)
    sources = {each["uid"]: each for each in yaml.safe_load((tmp_path / "o/grafana/datasources/tandem.yml").read_text())["datasources"]}
    (link,) = sources["tandem-loki"]["jsonData"]["derivedFields"]
    assert re.search(link["matcherRegex"], line)[1] == "a" * 32 and link["datasourceUid"] in sources
    assert sources["tandem-jaeger"]["jsonData"]["tracesToLogsV2"]["datasourceUid"] == "tandem-loki"
