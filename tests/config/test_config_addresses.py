import pytest

from tandem.config.addresses import check_no_secret
from tandem.config.checkpoint import CheckpointConfig
from tandem.config.registry import RegistryConfig
from tandem.storage.files import open_storage
from tandem.types import UserError

SECRET = "hunter2"
ADDRESSES = (
    f"s3://me:{SECRET}@bucket/folder", f"http://me:{SECRET}@host:5000", f"https://host/folder?X-Amz-Signature={SECRET}", f"abfs://folder?sig={SECRET}",
    f"https://host/?access_token={SECRET}",
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_secret_is_refused_without_being_repeated(address: str) -> None:
    for refuse in (RegistryConfig(uri=address).check, CheckpointConfig(upload=address).check, lambda: open_storage(address)):
        with pytest.raises(UserError, match="has a password or a signature in its address") as caught:
            refuse()
        assert SECRET not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["runs/registry", "s3://bucket/folder", "http://host:5000", "sqlite:///mlflow.db", "s3://bucket?versions=1", "C://x"])
def test_other_addresses_are_taken(address: str) -> None:
    check_no_secret("it", address)
