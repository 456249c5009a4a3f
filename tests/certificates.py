"""Certificates for tests."""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

PEM = serialization.Encoding.PEM


def certificate(
    folder: Path, name: str, signer: "tuple[x509.Certificate, Any] | None" = None, *, days: tuple[int, int] = (-1, 1)
) -> tuple[x509.Certificate, Any]:
    """Writes ``NAME.crt`` and ``NAME.key``, signed by ``signer`` or by itself, valid in the ``days`` from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=subject if signer is None else signer[0].subject, public_key=key.public_key())
    begins, ends = (now + datetime.timedelta(days=each) for each in days)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    made = builder.sign(key if signer is None else signer[1], hashes.SHA256())
    (folder / f"{name}.crt").write_bytes(made.public_bytes(PEM))
    (folder / f"{name}.key").write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return made, key
