"""Finds the API server: a context of the kubeconfig, or the cluster in which this process runs. Exec plugins, certificates and tokens that are renewed are the
official client's."""

import difflib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.types import UserError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECTIONS = 2
"""Further attempts to connect. What was sent once is not sent again."""


@dataclass(frozen=True, slots=True)
class Connection:
    """``context``: its name in the kubeconfig, empty inside of a cluster. ``namespace``: that of the context."""

    client: "ApiClient"
    context: str
    namespace: str


def check_installed() -> None:
    """Raises ``UserError`` without the client."""
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError("'--on kubernetes' needs the package kubernetes, which is not installed; pip install 'tandem-rl[kubernetes]'")


def connect(context: str) -> Connection:
    """Returns the connection of ``context``, empty for the current one. Nothing is sent. Raises ``UserError`` where there is none."""
    check_installed()
    from kubernetes import client, config
    from urllib3.util import Retry
    from yaml import YAMLError

    # It would tell of every further attempt, on standard error.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    settings, file = client.Configuration(), kubeconfig_file()
    name, namespace = context, ""
    with _errors_of_plugins():
        try:
            contexts, current = config.list_kube_config_contexts(file)
        except (YAMLError, TypeError, KeyError, AttributeError, ValueError, UnicodeError) as error:
            raise UserError(f"the kubeconfig '{file}' is damaged: {_line(error)}; 'kubectl config view' must work") from None
        except config.ConfigException as error:
            if context:
                raise UserError(f"'kubernetes.context' is '{context}', and there is no kubeconfig with it ({_line(error)}); set KUBECONFIG") from None
            try:
                config.load_incluster_config(settings)
            except config.ConfigException:
                raise UserError(
                    f"no cluster: {_line(error)}, and this is not a pod; set KUBECONFIG, or give the command without '--on kubernetes'"
                ) from None
            namespace = _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.is_file() else ""
        else:
            chosen = _chosen(context, contexts, current)
            name, namespace = chosen["name"], chosen["context"].get("namespace") or ""
            try:
                config.load_kube_config(file, context=name, client_configuration=settings, persist_config=False)
            except (config.ConfigException, OSError, TypeError, KeyError, AttributeError, ValueError) as error:
                raise UserError(f"context '{name}' of the kubeconfig cannot be used: {_line(error)}") from None
    settings.retries = Retry(total=_CONNECTIONS, connect=_CONNECTIONS, read=0, redirect=0, status=0, other=0, backoff_factor=0.2)
    return Connection(client.ApiClient(settings), name, namespace or "default")


def kubeconfig_file() -> str:
    """Returns the path of the kubeconfig; several of them are divided by colons."""
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def _chosen(context: str, contexts: list[dict[str, Any]], current: dict[str, Any]) -> dict[str, Any]:
    if not context:
        return current
    there = {each["name"]: each for each in contexts}
    if context not in there:
        near = difflib.get_close_matches(context, there, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(sorted(there)[:20])}"
        raise UserError(f"'kubernetes.context' is '{context}', which the kubeconfig ({kubeconfig_file()}) does not have; {hint}")
    return there[context]


@contextmanager
def _errors_of_plugins() -> Iterator[None]:
    """Raises ``UserError`` for what the client only logs, and would go on without credentials: an exec plugin that fails."""
    records: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Collect(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    if records:
        raise UserError(f"the kubeconfig gives no credentials: {_line(records[0])}; log in again ('kubectl get pods' must work)")


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
