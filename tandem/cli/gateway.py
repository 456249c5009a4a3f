"""Serve the models of several servers at one address: load balancing, health, retries.

The backends are servers of OpenAI's API: tandem serve, vLLM, SGLang, or a hosted service.

examples:
  tandem gateway --backends http://127.0.0.1:8000,http://127.0.0.1:8001
  tandem gateway gateway.yaml
  tandem gateway gateway.yaml --check
  tandem gateway --demo                           two servers of the model that 'make run' trained, a key, and the chat page
  tandem gateway gateway.yaml --emit envoy --gateways http://10.0.0.2:8080,http://10.0.0.3:8080 > envoy.yaml
"""

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.types import UserError

if TYPE_CHECKING:
    from tandem.config.gateway import GatewayConfig
    from tandem.config.servers import ServersConfig

_MOST_BYTES = 2**20
_FILES = ("api_key_file", "ca_file", "cert_file", "cert_key_file")
"""Files of a backend."""
_TLS_FILES = ("cert_file", "key_file", "client_ca_file")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the gateway's settings (docs/gateway.md lists the keys)")
    parser.add_argument("--backends", metavar="URL,URL", help="the servers, in place of those of the file")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (default: 8080)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that serve the address; limits then need Redis (default: 1)")
    parser.add_argument(
        "--demo", nargs="?", const="", metavar="MODEL", help="serve a model or a run twice and open the chat page (default: runs/sort/model, of 'make run')"
    )
    parser.add_argument("--no-browser", action="store_true", help="with --demo: print the address of the page alone")
    parser.add_argument("--emit", choices=("envoy", "haproxy", "nginx"), help="print the settings of a load balancer in front of several gateways, and stop")
    parser.add_argument("--gateways", metavar="URL,URL", help="with --emit: the gateways; --host and --port are those of the load balancer")
    parser.add_argument("--check", action="store_true", help="check the settings, ask every backend once, and stop")


def run(options: argparse.Namespace) -> int:
    for module in ("aiohttp", "starlette", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"'tandem gateway' needs {module}, which is not installed; pip install 'tandem-rl[gateway]'")
    if options.demo is not None:
        return _demo(options)
    if options.no_browser:
        raise UserError("--no-browser is for --demo")
    from tandem.config.gateway import GatewayConfig
    from tandem.config.load import build

    def read() -> GatewayConfig:
        return build(GatewayConfig, _settings(options))

    config = read()
    for name, servers in config.servers.items():
        _check_flags(name, servers)
    if (options.emit is None) != (options.gateways is None):
        needs = "--emit needs --gateways URL,URL, the gateways behind the load balancer"
        raise UserError(needs if options.emit else "--gateways is for --emit envoy|haproxy|nginx")
    if options.emit is not None:
        print(_emitted(config, options.emit, options.gateways), end="")
        return 0
    if options.check:
        from tandem.gateway.check import check_gateway

        return check_gateway(config)
    from tandem.gateway.server import run_gateway

    return run_gateway(config, read=read if options.file is not None else None)


def _check_flags(name: str, servers: "ServersConfig") -> None:
    """Raises ``UserError`` for flags that ``tandem serve`` would refuse."""
    from tandem.cli.engine_options import engine_args
    from tandem.cli.flags_file import flag_words
    from tandem.cli.main import parser
    from tandem.cli.vllm_flags import check_flags

    if importlib.util.find_spec("fastapi") is None:
        raise UserError("'servers' needs fastapi, which is not installed; pip install 'tandem-rl[serve,gateway]'")
    command = parser().commands["serve"]
    try:
        words = flag_words("flags", servers.flags, command)
        check_flags(words, command._option_string_actions)
        engine_args(command.parse_args([servers.model, *words]))
    except UserError as error:
        raise UserError(f"'servers.{name}.flags': {error}") from None


def _demo(options: argparse.Namespace) -> int:
    """Raises ``UserError`` for an option that does not go with it."""
    for name in ("file", "backends", "emit", "gateways", "check", "workers"):
        if getattr(options, name):
            given = f"the file '{options.file}'" if name == "file" else f"--{name}"
            raise UserError(f"--demo has its own servers and settings; leave out {given}")
    if importlib.util.find_spec("fastapi") is None:
        raise UserError("'tandem gateway --demo' needs fastapi, which is not installed; pip install 'tandem-rl[serve,gateway]'")
    from tandem.gateway.demo import DEFAULT_MODEL, run_demo

    return run_demo(options.demo or DEFAULT_MODEL, options.host, options.port, opens_browser=not options.no_browser)


def _emitted(config: "GatewayConfig", kind: str, gateways: str) -> str:
    """Returns the configuration of a load balancer of ``kind``. Raises ``UserError``."""
    from tandem.gateway.emit.envoy import envoy
    from tandem.gateway.emit.front import make_front
    from tandem.gateway.emit.haproxy import haproxy
    from tandem.gateway.emit.nginx import nginx

    return {"envoy": envoy, "haproxy": haproxy, "nginx": nginx}[kind](make_front(config, gateways))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings of the file with those of the command line in their place. Raises ``UserError``."""
    settings: dict[str, Any] = {} if options.file is None else _read(options.file)
    if options.backends is not None:
        settings["backends"] = [{"url": url.strip()} for url in options.backends.split(",") if url.strip()]
    if not settings.get("backends") and not settings.get("servers"):
        raise UserError("no backends; give their addresses with --backends URL,URL or the key 'backends' of a file, or servers to start with 'servers'")
    settings |= {name: getattr(options, name) for name in ("host", "port", "workers") if getattr(options, name) is not None}
    return settings


def _read(path: str) -> dict[str, Any]:
    from tandem.config.yaml_text import read_mapping

    content = read_mapping(
        path, f"'{path}'", _MOST_BYTES, why_short="the settings of a gateway are a short YAML file",
        missing="name the file of the gateway's settings, or give --backends",
        wrong="has no settings; write 'backends:' with a list of URLs, as docs/gateway.md shows",
    )  # fmt: skip
    return _with_paths(content, Path(path).parent)


def _with_paths(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns ``settings`` with files named from the folder of the settings."""
    for name in ("keys_file", "audit_log", "registry", "targets_folder"):
        if isinstance(settings.get(name), str) and settings[name]:
            settings[name] = str(folder / settings[name])
    tls = settings.get("tls")
    if isinstance(tls, dict):
        settings["tls"] = {**tls, **{name: str(folder / tls[name]) for name in _TLS_FILES if isinstance(tls.get(name), str) and tls[name]}}
    servers = settings.get("servers")
    if isinstance(servers, dict):
        settings["servers"] = {name: _with_folders(each, folder) if isinstance(each, dict) else each for name, each in servers.items()}
    backends = settings.get("backends")
    if isinstance(backends, list):
        settings["backends"] = [
            {**each, **{name: str(folder / each[name]) for name in _FILES if isinstance(each.get(name), str) and each[name]}} if isinstance(each, dict) else
            {"url": each} if isinstance(each, str) else each
            for each in backends
        ]  # fmt: skip
    return settings


def _with_folders(servers: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns a section of ``servers`` with its folders named from the folder of the settings. A model that is no folder there is the name of one."""
    model, logs = servers.get("model"), servers.get("log_folder")
    here = {"model": str(folder / model)} if isinstance(model, str) and model and (folder / model).is_dir() else {}
    return {**servers, **here, **({"log_folder": str(folder / logs)} if isinstance(logs, str) and logs else {})}
