"""An OpenID Connect issuer for tests."""

import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from json_server import JsonServer

AUDIENCE = "tandem"


class Issuer:
    """An OpenID Connect issuer on this machine: its configuration and its keys over HTTP."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"one": rsa.generate_private_key(65537, 2048), "two": ec.generate_private_key(ec.SECP256R1())}
        self.listed = ["one", "two"]
        self.server = JsonServer(self._answer)
        self.url = f"{self.server.url}/realm"
        self.configuration = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    def _answer(self, path: str) -> Any:
        return self.configuration if path.endswith("/openid-configuration") else {"keys": [self.public(id) for id in self.listed]}

    def public(self, id: str) -> dict[str, Any]:
        key = self.keys[id].public_key()
        algorithm = jwt.algorithms.RSAAlgorithm if isinstance(self.keys[id], rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
        return {**json.loads(algorithm.to_jwk(key)), "kid": id, "use": "sig"}

    def token(self, id: str = "one", **claims: Any) -> str:
        algorithm = "RS256" if isinstance(self.keys[id], rsa.RSAPrivateKey) else "ES256"
        content = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "org": "research", "exp": time.time() + 600, **claims}
        return jwt.encode({name: value for name, value in content.items() if value is not None}, self.keys[id], algorithm, headers={"kid": id})
