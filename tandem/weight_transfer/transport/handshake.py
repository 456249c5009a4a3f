"""How two pods show each other that they have the run's credential, which itself is never sent.

Each side sends a random number, and the HMAC-SHA256 with the credential over both numbers and the side's name. A server that does not know the
credential is found out before anything is asked of it, a client before anything is answered.
"""

import hashlib
import hmac
import os

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.types.errors import RunError

_FRAME_BYTES = 4096
"""The largest frame that is read from a side that has not shown the credential."""


def admits(channel: Channel, credential: str, deadline: Deadline) -> bool:
    """Returns whether the client has the credential; shows it that the server has it. Raises as ``Channel.receive`` does."""
    hello = channel.receive(deadline, _FRAME_BYTES)
    theirs, ours = hello.meta.get("number"), os.urandom(32).hex()
    if hello.kind != "hello" or not isinstance(theirs, str):
        raise BrokenFrame(f"the connection began with '{hello.kind}'")
    channel.send({"number": ours, "proof": _proof(credential, "server", theirs, ours)}, kind="challenge", deadline=deadline)
    answer = channel.receive(deadline, _FRAME_BYTES)
    return answer.kind == "proof" and _is_same(answer.meta.get("proof"), _proof(credential, "client", theirs, ours))


def introduce(channel: Channel, credential: str, peer: str, deadline: Deadline) -> None:
    """Shows ``peer`` the credential. Raises ``RunError`` if it does not have the same one, or refuses; and as ``Channel.receive`` does."""
    ours = os.urandom(32).hex()
    channel.send({"number": ours}, kind="hello", deadline=deadline)
    challenge = channel.receive(deadline, _FRAME_BYTES)
    theirs = str(challenge.meta.get("number"))
    if challenge.kind != "challenge" or not _is_same(challenge.meta.get("proof"), _proof(credential, "server", ours, theirs)):
        raise RunError(f"{peer} does not have this pod's credential; give both pods the same credential file")
    channel.send({"proof": _proof(credential, "client", ours, theirs)}, kind="proof", deadline=deadline)
    answer = channel.receive(deadline, _FRAME_BYTES)
    if answer.kind != "welcome":
        raise RunError(f"{peer} refused the connection: {answer.meta.get('message')}")


def _proof(credential: str, side: str, client_number: str, server_number: str) -> str:
    text = f"tandem weights {side} {client_number} {server_number}"
    return hmac.new(credential.encode(), text.encode(), hashlib.sha256).hexdigest()


def _is_same(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode("utf-8", "replace"), expected.encode())
