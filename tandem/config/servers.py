"""The settings of the servers that ``tandem gateway`` starts itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.roles import Role
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

MOST_SERVERS = 1024
"""In one gateway."""
OWN_FLAGS = {
    "host": "its servers listen on 127.0.0.1", "port": "it gives each a free port", "served_model_name": "write it as 'served_model_name' of the section",
    "role": "write it as 'role' of the section",
    "api_key": "it makes one for each", "control_key": "it makes one for each", "model": "write it as 'model' of the section", "config": "write the flags here",
    "follow": "its servers take other weights by updates", "follow_mode": "its servers take other weights by updates",
    "weight_version": "it says which weights they are",
}  # fmt: skip
"""Flags of ``tandem serve`` that the gateway gives itself, and why."""


def flag_name(key: str) -> str:
    """Returns the name of a flag as it is written with underscores and without the dashes before it."""
    return key.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """When the number of servers changes: by how long the oldest request waits."""

    min_count: int = 1
    """Fewest servers. 0: the last one ends too when nothing is asked for, and the next request waits until one has loaded."""
    max_count: int = 0
    """Most servers. 0: the number does not change."""
    target_wait_s: float = 1.0
    """How long a request may wait, in the gateway or in a server, before there are too few servers."""
    upscale_delay_s: float = 5.0
    """Time for which the oldest request must have waited longer in every look before servers are added."""
    downscale_delay_s: float = 300.0
    """Time for which nothing must have waited, and one server less have been enough, before one ends."""
    low_requests: float = 1.0
    """Requests in flight for each server that stays, up to which one less is enough."""

    def check(self) -> None:
        """Raises ``UserError`` for values that cannot work."""
        if not 0 <= self.min_count <= MOST_SERVERS or not 0 <= self.max_count <= MOST_SERVERS:
            name = "min_count" if not 0 <= self.min_count <= MOST_SERVERS else "max_count"
            raise UserError(f"'servers.scale.{name}' is {getattr(self, name)}; it must be from 0 to {MOST_SERVERS}")
        if self.max_count == 0:
            names = ("min_count", "target_wait_s", "upscale_delay_s", "downscale_delay_s", "low_requests")
            refuse_unread("servers.scale", self, "max_count is 0, so the number does not change", *names, fix="set servers.scale.max_count")
        elif self.max_count < self.min_count:
            raise UserError(f"'servers.scale.max_count' is {self.max_count}, less than 'min_count' ({self.min_count}); make it at least that")
        check_seconds("servers.scale", self, "target_wait_s", "upscale_delay_s", "downscale_delay_s")
        if not 0 <= self.low_requests <= 10**6:
            raise UserError(f"'servers.scale.low_requests' is {self.low_requests:g}; it must be from 0 to 1000000")


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """How servers get another version of their model."""

    method: Literal["auto", "in_place", "replace"] = "auto"
    """`in_place`: a server finishes what it has and loads the weights into its engine, where only weights differ. `replace`: a new server takes its place.
    `auto`: in place, where another server takes the requests meanwhile."""
    settle_s: float = 1.0
    """Time for which a server must answer its probes and requests with the version before the next one gets it."""

    def check(self) -> None:
        """Raises ``UserError`` for values that cannot work."""
        if not 0 <= self.settle_s <= 86_400:
            raise UserError(f"'servers.update.settle_s' is {self.settle_s:g}; it must be from 0 to 86400")


@dataclass(frozen=True, slots=True)
class ServersConfig:
    """Servers (`tandem serve`) of one model on this machine, which the gateway starts, watches and ends."""

    model: str
    """What they serve, as `tandem serve` takes it: a folder (from the folder of the gateway's file), a model of the Hub or an address in object storage. With
    `registry` also `models/NAME/3`, and `models/NAME@production`, the version in that stage, which they follow."""
    served_model_name: str = ""
    """Its name for clients. Empty: that of the section. Sections with one name have the servers of one model, each with another `role`."""
    role: Role = "both"
    """`prefill`: they compute prompts, and answer themselves only while no other server of the model can; `decode`: they fetch the KV blocks of those prompts
    and answer. If a section of a model has a role, all of its servers exchange KV blocks, with a key that the gateway makes (or the flag `kv-transfer-key`)."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags of `tandem serve` with their values, for example `{max-model-len: 4096, device: cuda, tensor-parallel-size: 2}`."""
    count: int = 1
    """How many there are; with `scale` at the start."""
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    """Between which numbers, and when, it changes."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    """How they get another version."""
    gpus: tuple[str, ...] = ()
    """With `device: cuda`: the GPUs that they may use, as `CUDA_VISIBLE_DEVICES` names them. Empty: all that the gateway may use. Each server has as many of
    its own as it has ranks."""
    servers_per_gpu: int = 1
    """How many servers may share a GPU; with more than 1 give each a part of its memory (`gpu-memory-utilization`)."""
    max_requests: int = 256
    """Requests that each has at once; more wait in the gateway."""
    start_s: float = 600.0
    """Time for one to load its model; after that it is started again."""
    log_folder: str = ""
    """Folder of their logs. Empty: one that is removed when the gateway ends; the last lines of a server that dies are in the gateway's log in any case."""

    def model_name(self, section: str) -> str:
        """Returns the model's name for clients."""
        return self.served_model_name or section

    @property
    def most(self) -> int:
        """How many servers there may be at once."""
        return max(self.count, self.scale.max_count)

    @property
    def gpus_each(self) -> int:
        """How many GPUs one server takes."""
        named = {flag_name(key): value for key, value in self.flags.items()}
        if named.get("device") != "cuda":
            return 0
        sizes = [named.get(name, 1) for name in ("tensor_parallel_size", "instances")]
        return sizes[0] * sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else 1

    def refuse_restart(self, name: str, before: "ServersConfig | None") -> None:
        """Raises ``UserError`` if servers of the section ``name`` that run with ``before`` would have to be started anew to follow these settings."""
        kept = ("model", "served_model_name", "role", "flags", "gpus", "servers_per_gpu", "log_folder")
        key = name if before is None else next((f"{name}.{key}" for key in kept if getattr(self, key) != getattr(before, key)), None)
        if key is not None:
            raise UserError(f"'servers.{key}' cannot change while the gateway runs; restart it, or put back what was there")

    def check(self) -> None:
        """Raises ``UserError`` for values that cannot work."""
        if not self.model:
            raise UserError("a section of 'servers' has an empty 'model'; name a folder or a model of the Hub")
        check_at_least_one("servers", self, "servers_per_gpu", "max_requests")
        if self.role == "prefill" and self.scale.max_count and self.scale.min_count < 1:
            raise UserError(
                f"'servers.scale.min_count' is {self.scale.min_count} with role: prefill; no request waits for these servers, so that none would be started "
                "again; make it at least 1"
            )
        low, high = (self.scale.min_count, self.scale.max_count) if self.scale.max_count else (1, MOST_SERVERS)
        if not low <= self.count <= high:
            raise UserError(f"'servers.count' is {self.count}; it must be from {low} to {high}{', as scale says' if self.scale.max_count else ''}")
        check_seconds("servers", self, "start_s")
        for key in self.flags:
            why = OWN_FLAGS.get(flag_name(key))
            if why is not None:
                raise UserError(f"'servers' has the flag '{key}', which the gateway gives itself: {why}; leave it out")
        device = {flag_name(key): value for key, value in self.flags.items()}.get("device", "cpu")
        if device not in ("cpu", "cuda"):
            raise UserError(f"'servers' has the flag device: {device}; write cuda, and the GPUs in 'gpus'")
        if device == "cpu" and (self.gpus or self.servers_per_gpu > 1):
            name = "gpus" if self.gpus else "servers_per_gpu"
            raise UserError(f"'servers.{name}' is given, and its servers compute on the CPU; add the flag device: cuda")
        if len(set(self.gpus)) < len(self.gpus):
            raise UserError(f"'servers.gpus' names a GPU twice: {', '.join(self.gpus)}; name each once")


def check_servers(servers: Mapping[str, ServersConfig], names: list[str], registry: str) -> None:
    """Raises ``UserError`` for a name that cannot be one, or that ``names`` of backends have, and for a stage without a ``registry``."""
    for name, config in servers.items():
        if config.model.startswith("models/") and "@" in config.model and not registry:
            raise UserError(f"'servers.{name}.model' is '{config.model}', a stage of the model registry; name the folder of that in 'registry'")
        if not name or not name.isprintable() or any(letter in name for letter in ' "\\'):
            raise UserError(f"'servers' has the section {name!r}; its name is the model's name for clients: give it letters, digits and -_./ alone")
        if not config.served_model_name.isprintable() or any(letter in config.served_model_name for letter in ' "\\'):
            raise UserError(f"'servers.{name}.served_model_name' is {config.served_model_name!r}; give it letters, digits and -_./ alone")
        taken = next((each for each in names if each.rpartition("-")[0] == name and each.rpartition("-")[2].isdigit()), None)
        if taken is not None:
            raise UserError(f"'backends' has the name '{taken}', which a server of '{name}' has; give the backend another one")
    if sum(config.most for config in servers.values()) > MOST_SERVERS:
        raise UserError(f"'servers' has more than {MOST_SERVERS} servers in all; lower a 'count'")
