"""The library that speaks to an object storage, found by the address's scheme: fsspec's, where this package opens it and nowhere else."""

from collections.abc import Mapping
from typing import Any

from tandem.config.addresses import check_no_secret
from tandem.types import UserError


def is_local(url: str) -> bool:
    """Whether ``url`` is a path or ``file://``."""
    scheme, separator, _ = url.partition("://")
    return not separator or scheme == "file"


def local_path(url: str) -> str:
    """The path that a local ``url`` names."""
    return url.removeprefix("file://")


def connect(url: str, options: Mapping[str, Any] | None = None, *, is_cached: bool = True) -> tuple[Any, str]:
    """The file system at ``url`` and the root in it. ``options`` reach the library, which finds credentials and endpoints itself (for
    S3 the usual AWS settings). Without ``is_cached`` every listing is requested again. Raises ``UserError`` in one line."""
    scheme = url.partition("://")[0]
    check_no_secret(f"the {scheme} storage", url)
    extra = "tandem-rl[s3]" if scheme in ("s3", "s3a") else "fsspec"
    try:
        import fsspec.core
    except ImportError:
        raise UserError(f"'{url}' needs fsspec, which is not installed; pip install '{extra}'") from None
    try:
        arguments = {**({} if is_cached else {"use_listings_cache": False}), **(options or {})}
        backend, root = fsspec.core.url_to_fs(url, **arguments)
    except ImportError:
        raise UserError(f"'{url}' needs a library that is not installed; pip install '{extra}'") from None
    except (ValueError, OSError) as error:
        raise UserError(f"'{url}' cannot be read: {' '.join(str(error).split())}") from None
    return backend, root.rstrip("/")
