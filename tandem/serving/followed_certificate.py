"""A certificate whose files change while a server runs."""

import asyncio
from collections.abc import Callable

from tandem.runtime.tls import ServerTls, TlsFiles
from tandem.types import UserError

REFRESH_S = 2.0
"""How often files that are followed are read."""


async def follow_files(tls: ServerTls, files: TlsFiles, say: Callable[[str], None], period_s: float = REFRESH_S) -> None:
    """Takes the content of files that change. Those that cannot be used are named once, and the certificate stays the one before."""
    refused = ""
    while True:
        await asyncio.sleep(period_s)
        try:
            fresh = await asyncio.to_thread(tls.fresh, files)
        except UserError as error:
            if str(error) != refused:
                refused = str(error)
                say(f"the certificate stays as it was: {refused}")
            continue
        refused = ""
        if fresh is not None:
            tls.follow(fresh)
            say(f"the certificate '{files.cert_file}' was read again")
