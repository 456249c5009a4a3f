"""Section ``coordination``: values that cannot be right are one line that says what to write."""

import pytest

from tandem.config.coordination import CoordinationConfig
from tandem.types import UserError

WRONG = [
    ({"endpoints": ()}, r"'coordination\.endpoints' has 0 URLs; it needs 1 to 64"),
    ({"endpoints": ("127.0.0.1:2379",)}, r"'coordination\.endpoints' has '127\.0\.0\.1:2379'; write http://HOST:PORT"),
    ({"endpoints": ("http://host",)}, "write http://HOST:PORT"),
    ({"endpoints": ("http://host:99999",)}, "which is not a URL; write http://HOST:PORT"),
    ({"endpoints": ("http://host:2379/v3",)}, "with more than scheme, host and port"),
    ({"endpoints": ("http://root:secret@host:2379",)}, "^(?!.*secret).*has a password"),
    ({"prefix": "tandem"}, "it must begin with '/'"),
    ({"lease_s": 1.0}, "it must be at least 2"),
    ({"deadline_s": 0.0}, "it must be above 0 seconds"),
    ({"cluster_id": "0x12"}, "it must be a hexadecimal number"),
    ({"cacert": "ca.pem"}, "no endpoint begins with https://"),
    ({"cert": "c.pem", "endpoints": ("https://h:1",)}, r"'coordination\.cert' is given and 'coordination\.key' is not"),
    ({"user": "root"}, r"'coordination\.user' is given and 'coordination\.password_file' is not"),
    ({"store": "embedded", "user": "root"}, r"'coordination\.user' is 'root', which is not read: .* set coordination\.store to etcd, or remove the key"),
]


@pytest.mark.parametrize(("values", "line"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_value_is_one_line(values: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        CoordinationConfig(**{"store": "etcd", **values}).check()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_default_and_a_whole_section_are_right() -> None:
    CoordinationConfig().check()
    endpoints = ("https://etcd-0:2379", "https://[::1]:2379")
    CoordinationConfig(
        store="etcd", endpoints=endpoints, prefix="/a/b", cluster_id="cdf818194e3a8c32", cacert="a", cert="b", key="c", user="u", password_file="p"
    ).check()
