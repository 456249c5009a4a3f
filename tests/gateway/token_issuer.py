"""An OpenID Connect issuer for tests."""

import http.server
import json
import threading
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "tandem"


class Issuer:
    """An OpenID Connect issuer on this machine: its configuration and its keys over HTTP."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"one": rsa.generate_private_key(65537, 2048), "two": ec.generate_private_key(ec.SECP256R1())}
        self.listed = ["one", "two"]
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = issuer.configuration if self.path.endswith("/openid-configuration") else {"keys": [issuer.public(id) for id in issuer.listed]}
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/realm"
        self.configuration = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def public(self, id: str) -> dict[str, Any]:
        key = self.keys[id].public_key()
        algorithm = jwt.algorithms.RSAAlgorithm if isinstance(self.keys[id], rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
        return {**json.loads(algorithm.to_jwk(key)), "kid": id, "use": "sig"}

    def token(self, id: str = "one", **claims: Any) -> str:
        algorithm = "RS256" if isinstance(self.keys[id], rsa.RSAPrivateKey) else "ES256"
        content = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "org": "research", "exp": time.time() + 600, **claims}
        return jwt.encode({name: value for name, value in content.items() if value is not None}, self.keys[id], algorithm, headers={"kid": id})
