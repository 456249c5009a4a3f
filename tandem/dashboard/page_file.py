"""The dashboard's page as one file: its own scripts, styles and views, which answer from data in the page and need no server, no network and no other file."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

SHARED = ("dom.js", "events.js", "page.css", "icon.svg")
"""Files of the gateway's pages that the dashboard's pages use too."""
_STYLES = ("page.css", "vendor/uplot.css", "dashboard.css")
_LIVE, _FROZEN = "server.js", "frozen.js"
"""The module that asks the dashboard, and the one that takes its place."""
_NEEDS_SERVER = ("early.js", "events.js", _LIVE)
_IMPORT = re.compile(r'^(import .*?from |import )"\./([\w/.]+)";$', re.M)
_NAME = "tandem/"
"""What begins the names of modules in the import map: a relative name has no base in a module that is data."""


def dashboard_assets() -> dict[str, Traversable]:
    """Returns the files of the dashboard's pages by their names."""
    assets: dict[str, Traversable] = {}
    for package, wanted in (("tandem.dashboard", None), ("tandem.gateway", SHARED)):
        root = files(package).joinpath("assets")
        assets |= {each.name: each for each in root.iterdir() if each.is_file() and (wanted is None or each.name in wanted)}
        if wanted is None:
            assets |= {f"vendor/{each.name}": each for each in root.joinpath("vendor").iterdir()}
    return assets


def page_file(title: str, data: Mapping[str, Any], to_json: Callable[[Any], bytes]) -> str:
    """Returns the page that shows ``data``, made JSON by ``to_json``. Nothing but its own scripts can run in it."""
    assets = {name: each.read_text(encoding="utf-8") for name, each in dashboard_assets().items() if not name.endswith(".LICENSE")}
    modules = {name: text for name, text in assets.items() if name.endswith(".js") and name not in _NEEDS_SERVER}
    modules[_LIVE] = modules.pop(_FROZEN)
    imports = json.dumps({"imports": {_NAME + name: _module(text) for name, text in modules.items()}}, separators=(",", ":")).replace("<", "\\u003c")
    start = f'import "{_NAME}dashboard.js";'
    style = "\n".join(assets[name] for name in _STYLES)
    icon = "data:image/svg+xml;base64," + base64.b64encode(assets["icon.svg"].encode()).decode()
    policy = (
        f"default-src 'none'; script-src data: {_hash(imports)} {_hash(start)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<link rel="icon" href="{icon}" type="image/svg+xml">\n<style>{style}</style>\n'
        f'<script type="importmap">{imports}</script>\n'
    )
    # No end of a script can be inside.
    content = to_json(data).decode().replace("<", "\\u003c")
    page = assets["dashboard.html"]
    page = re.sub(r'<link rel="(?:icon|stylesheet|modulepreload)"[^>]*>\n|<script[^>]*></script>\n', "", page).replace("assets/icon.svg", icon)
    page = page.replace("<title>Runs · Tandem</title>\n", f"<title>{_text(title)} · Tandem</title>\n{head}")
    return page.replace("</body>", f'<script type="application/json" id="frozen">{content}</script>\n<script type="module">{start}</script>\n</body>')


def _module(text: str) -> str:
    """Returns a module as a URL that has it all. Its imports are by name."""
    named = _IMPORT.sub(lambda match: f'{match[1]}"{_NAME}{match[2]}";', text)
    # What a URL would lose or read as its own; the rest is left as it is, to be read.
    for letter in "%#\n\r\t":
        named = named.replace(letter, f"%{ord(letter):02X}")
    return "data:text/javascript;charset=utf-8," + named


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: str) -> str:
    return value.replace("&", "&amp;").replace("<", "&lt;")


def write_page(text: str, path: Path) -> None:
    """Writes the page to ``path`` through a temporary file, so that a reader never sees an incomplete page."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)
