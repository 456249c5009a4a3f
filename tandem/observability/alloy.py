"""Configuration of Grafana Alloy, which reads log files and sends their lines to Loki."""

import json
from collections.abc import Sequence
from pathlib import Path

LABELS = ("run", "role", "rank", "level")
"""Few values each, so that Loki keeps few streams; what has many is structured metadata."""
METADATA = ("trace_id", "step", "pid", "logger")
FILE_NAME = r"^(?:.*/(?P<run>[^/]+)/logs/(?:.*/)?|.*/)(?P<role>[^/]+?)\.log(?:\.\d+)?$"
"""The run and the process of a line that says neither, as what functions of the user print."""
LOKI = "http://127.0.0.1:3100/loki/api/v1/push"


def alloy_config(runs_folder: Path, log_folder: Path) -> str:
    """Returns the text of ``config.alloy``. ``runs_folder``: in which runs have their folders; ``log_folder``: of servers and gateways."""
    patterns = [f"{runs_folder}/*/logs/**/*.log", f"{log_folder}/*.log"]
    targets = ", ".join(f"{{__path__ = {json.dumps(pattern)}, job = \"tandem\"}}" for pattern in patterns)
    return f"""
local.file_match "tandem" {{
  path_targets = [{targets}]
}}

loki.source.file "tandem" {{
  targets    = local.file_match.tandem.targets
  forward_to = [loki.process.tandem.receiver]
}}

loki.process "tandem" {{
  forward_to = [loki.write.loki.receiver]

  stage.regex {{
    source     = "filename"
    expression = {json.dumps(FILE_NAME)}
  }}

  stage.json {{
    expressions = {_values(("time", *LABELS, *METADATA))}
  }}

  stage.timestamp {{
    source            = "time"
    format            = "RFC3339"
    action_on_failure = "fudge"
  }}

  stage.labels {{
    values = {_values(LABELS)}
  }}

  stage.structured_metadata {{
    values = {_values(METADATA)}
  }}

  stage.label_drop {{
    values = ["filename"]
  }}
}}

loki.write "loki" {{
  endpoint {{
    url = {json.dumps(LOKI)}
  }}
}}
""".lstrip()


def _values(names: Sequence[str]) -> str:
    return "{" + ", ".join(f'{name} = "{name}"' for name in names) + "}"
