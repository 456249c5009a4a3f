"""Section ``coordination``: the store in which the processes of a run find each other and publish weights."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from tandem.config.addresses import check_no_secret
from tandem.config.limits import check_seconds
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

MOST_ENDPOINTS = 64
_OF_ETCD = ("endpoints", "prefix", "cluster_id", "cacert", "cert", "key", "user", "password_file")


@dataclass(frozen=True, slots=True)
class CoordinationConfig:
    """The store in which the processes of a run publish weights and elect the controller. See `hybrid.md`, Coordination."""

    store: Literal["embedded", "etcd"] = "embedded"
    """`embedded`: a SQLite file in the run's folder, for processes of one machine. `etcd`: an etcd cluster, version 3.4 or later."""
    endpoints: tuple[str, ...] = ("http://127.0.0.1:2379",)
    """Client URLs of the etcd members, as of `etcdctl --endpoints`. If one does not answer, the next is asked."""
    prefix: str = "/tandem/"
    """Beginning of all keys in etcd; the keys of a run are under `PREFIX/RUN_NAME/`."""
    deadline_s: float = 240.0
    """Seconds that a call waits for an etcd that does not answer. Then the run ends, and `tandem resume` continues it."""
    lease_s: float = 15.0
    """Time to live of the leases of the controller and of the members: so long after one dies, its keys are gone. Whole seconds are used."""
    cluster_id: str = ""
    """Id of the etcd cluster, in hexadecimal as of `etcdctl endpoint status`. Empty: the one that the run began in; a resume refuses another."""
    cacert: str = ""
    """File with the certificate authority of `https://` endpoints, as of `etcdctl --cacert`. Empty: those of the system."""
    cert: str = ""
    """File with the client's certificate, as of `etcdctl --cert`. Empty: none."""
    key: str = ""
    """File with the key of `cert`, as of `etcdctl --key`."""
    user: str = ""
    """User of etcd. Empty: no authentication."""
    password_file: str = ""
    """File with the user's password, which so is not written to the recipe; for example a mounted Kubernetes secret."""

    def check(self) -> None:
        """Raises ``UserError`` for endpoints, a prefix or files that cannot be right."""
        check_seconds("coordination", self, "deadline_s", "lease_s")
        if self.lease_s < 2:
            raise UserError(f"'coordination.lease_s' is {self.lease_s:g}; it must be at least 2, so that a busy machine can renew it in time")
        if self.store == "embedded":
            reason = "'coordination.store' is 'embedded', which is a file of the run"
            refuse_unread("coordination", self, reason, *_OF_ETCD, fix="set coordination.store to etcd")
            return
        if not 1 <= len(self.endpoints) <= MOST_ENDPOINTS:
            raise UserError(f"'coordination.endpoints' has {len(self.endpoints)} URLs; it needs 1 to {MOST_ENDPOINTS}, for example [http://127.0.0.1:2379]")
        for endpoint in self.endpoints:
            _check_endpoint(endpoint)
        schemes = {urlsplit(endpoint).scheme for endpoint in self.endpoints}
        if not self.prefix.startswith("/") or not self.prefix.isprintable():
            raise UserError(f"'coordination.prefix' is {self.prefix!r}; it must begin with '/', for example /tandem/")
        if self.cluster_id.strip("0123456789abcdef"):
            raise UserError(f"'coordination.cluster_id' is {self.cluster_id!r}; it must be a hexadecimal number, as of etcdctl endpoint status")
        if bool(self.cert) != bool(self.key):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise UserError(f"'coordination.{given}' is given and 'coordination.{missing}' is not; a client's certificate needs both files")
        if "https" not in schemes and (self.cacert or self.cert):
            name = "cacert" if self.cacert else "cert"
            raise UserError(f"'coordination.{name}' is given and no endpoint begins with https://; write https:// in coordination.endpoints, or remove the key")
        if bool(self.user) != bool(self.password_file):
            given, missing = ("user", "password_file") if self.user else ("password_file", "user")
            raise UserError(f"'coordination.{given}' is given and 'coordination.{missing}' is not; authentication needs both")


def _check_endpoint(endpoint: str) -> None:
    check_no_secret("an item of 'coordination.endpoints'", endpoint)
    fix = "write http://HOST:PORT or https://HOST:PORT, as of etcdctl --endpoints"
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        raise UserError(f"'coordination.endpoints' has {endpoint!r}, which is not a URL; {fix}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port is None or not port:
        raise UserError(f"'coordination.endpoints' has {endpoint!r}; {fix}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise UserError(f"'coordination.endpoints' has {endpoint!r}, with more than scheme, host and port; {fix}")
