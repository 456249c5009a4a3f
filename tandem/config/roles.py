"""What a server does in a group of servers that compute prompts and answers apart."""

from typing import Literal, get_args

Role = Literal["both", "prefill", "decode"]
"""``prefill``: computes prompts, whose KV blocks others fetch. ``decode``: fetches them and answers. ``both``: either. It is what a router goes by; every
server answers whole requests too, so that a model is served while half of its servers are dead."""
ROLES: tuple[Role, ...] = get_args(Role)
