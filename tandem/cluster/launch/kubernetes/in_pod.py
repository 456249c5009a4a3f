"""What the containers of a run share: where their secrets, certificates and addresses are, and the file by which pods find the run's controller. Imports
nothing of a run."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.cluster.launch.record import CREDENTIAL, FOLDER, PASSWORD
from tandem.storage.folder_manifest import replace_file
from tandem.types import RunError

SECRETS, CERTIFICATES = Path("/var/run/tandem/secrets"), Path("/var/run/tandem/tls")
"""Where the Secrets are mounted."""
CALLS_PORT, WEIGHTS_PORT, METRICS_PORT = 9100, 9200, 9400
ADDRESS, NAME = "TANDEM_POD_IP", "TANDEM_POD_NAME"
"""Environment variables with the pod's address and name."""
_MEETING = "meeting.json"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the controller is at present. ``id``: another one whenever it has been started again. ``overrides``: with which a pod joins it."""

    id: str
    host: str
    overrides: tuple[str, ...] = ()


def write_meeting(directory: Path, meeting: Meeting) -> None:
    """Tells the pods of the run in ``directory``, by one atomic rename."""
    replace_file(directory / FOLDER / _MEETING, json.dumps(asdict(meeting)))


def read_meeting(directory: Path) -> Meeting | None:
    """Returns where the controller is; ``None`` if it has not said so yet."""
    try:
        data = json.loads((directory / FOLDER / _MEETING).read_text(encoding="utf-8"))
        return Meeting(data["id"], data["host"], tuple(data["overrides"]))
    except (FileNotFoundError, ValueError, KeyError):
        return None


def private_secrets(folder: Path, mounted: Path = SECRETS) -> dict[str, Path]:
    """Copies the run's secrets to ``folder``, readable by this user alone: Kubernetes makes mounted ones readable by the pod's group. Returns the files by
    name. Raises ``RunError`` where one is missing."""
    found = {}
    for name in (CREDENTIAL, PASSWORD):
        try:
            text = (mounted / name).read_bytes()
        except OSError as error:
            raise RunError(f"the secret '{mounted / name}' is not mounted in this pod: {error.strerror}") from None
        found[name] = folder / name
        file = os.open(found[name], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(text)
    return found


def tls_overrides(mounted: Path = CERTIFICATES) -> list[str]:
    """Returns the values of section ``pods`` for mounted certificates, which may be renewed; none where none are mounted."""
    names = {"tls_cert_file": "tls.crt", "tls_key_file": "tls.key", "tls_ca_file": "ca.crt"}
    return [f"--pods.{key}={mounted / name}" for key, name in names.items()] if (mounted / "tls.crt").is_file() else []
