"""Addresses of object storage and servers, which are written to recipes, logs and reports."""

from urllib.parse import parse_qsl, urlsplit

from tandem.types.errors import UserError

_SECRETS = ("signature", "sig", "token", "secret", "password", "credential", "key")


def has_secret(address: str) -> bool:
    """Returns whether ``address`` has a password or a signature in it."""
    if "://" not in address:
        return False
    try:
        parts = urlsplit(address)
        return parts.password is not None or any(name.lower().endswith(_SECRETS) for name, _ in parse_qsl(parts.query))
    except ValueError:
        return False


def check_no_secret(what: str, address: str) -> None:
    """Raises ``UserError``, without the address, if it has a password or a signature in it. ``what`` names it."""
    if has_secret(address):
        raise UserError(
            f"{what} has a password or a signature in its address, which would be written to the recipe, logs and reports; leave it out and give "
            "it as the service's own library reads it (for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for MLflow MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD)"
        )
