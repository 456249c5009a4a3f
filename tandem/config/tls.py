"""The section ``tls`` of a gateway's file."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS of the gateway's own address. The files are PEM, and are read again on SIGHUP and by a reload."""

    cert_file: str = ""
    """File with its certificate and those of the authorities between it and a root. Empty: it speaks plain HTTP."""
    key_file: str = ""
    """File with the private key of that certificate, not encrypted."""
    client_ca_file: str = ""
    """File with the certificates of authorities, of one of which every client must show a certificate (mutual TLS, TLS 1.3). Empty: none is asked for."""

    @property
    def is_on(self) -> bool:
        return bool(self.cert_file)

    def check(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise UserError("'tls' has only one of 'cert_file' and 'key_file'; give both")
        if self.client_ca_file and not self.cert_file:
            raise UserError("'tls.client_ca_file' is given without 'tls.cert_file' and 'tls.key_file'; clients show certificates over TLS only")
