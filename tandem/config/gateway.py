"""The settings of ``tandem gateway``: the sections and keys of its file."""

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from tandem.config.addresses import check_no_secret
from tandem.config.hedge import HedgeConfig
from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.oidc import OidcConfig
from tandem.config.roles import Role
from tandem.config.routing import RouteConfig, RouterConfig, check_routes
from tandem.config.servers import ServersConfig, check_servers
from tandem.config.servers_apart import check_roles
from tandem.config.tls import TlsConfig
from tandem.config.traces import TracesConfig
from tandem.types.errors import UserError

MOST_BACKENDS = 1024
MOST_BODY_MIB = 2**12
MOST_WORKERS = 64


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """A server that answers OpenAI's API: Tandem's, vLLM's, SGLang's or a hosted one."""

    url: str
    """Its address up to the path of the API, for example `http://10.0.0.5:8000`."""
    name: str = ""
    """Its name in logs and metrics. Empty: host and port of the URL."""
    models: tuple[str, ...] = ()
    """The models that it serves. Empty: it is asked for them (`/v1/models`)."""
    replicated: bool = False
    """Several servers answer at its URL, such as replicas behind a proxy of Ray Serve or a Service of Kubernetes. What one of them fails is sent there again,
    as to another backend, and a stream that breaks off goes on. Failures do not open its circuit breaker, because they are those of one of the servers: probes
    alone say whether it answers. The KV caches behind it are not looked at."""
    weight: float = 1.0
    """Its capacity beside the others: with 2 it is given twice the work."""
    max_requests: int = 256
    """Requests that it has at once; more wait in the gateway, where they can still go to another one."""
    zone: str = ""
    """Where it runs, for example a rack or a data centre; see `router.zone_tokens`."""
    role: Role | None = None
    """What it does among the servers of its models that exchange KV blocks: `prefill` computes prompts for others, `decode` answers, `both` does either.
    Empty: as it says itself (`tandem serve --role`)."""
    cache_tokens: int = 0
    """Tokens that its prefix cache holds, for `router.prefix`; `tandem serve` and vLLM say it when they start. 0: not known."""
    ca_file: str = ""
    """File with the certificates of the authorities that its certificate must be of (`https`). Empty: those of the system."""
    cert_file: str = ""
    """File with the certificate that the gateway shows it (mutual TLS)."""
    cert_key_file: str = ""
    """File with the private key of that certificate."""
    api_key_file: str = ""
    """File with the key that it needs. Empty: it is sent the client's own `Authorization`, unless the gateway has keys itself."""
    probe: str = ""
    """Path that it is probed at. Empty: `/readiness`, where it has none `/health`, then `/v1/models`."""

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.url).netloc

    def check(self) -> None:
        """Raises ``UserError`` for an address, a weight or a path that cannot be right."""
        check_no_secret("a URL of 'backends'", self.url)
        fix = "write http://HOST:PORT, without the path of the API"
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:
            raise UserError(f"'backends' has the URL {self.url!r}, which is not one; {fix}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username is not None:
            raise UserError(f"'backends' has the URL {self.url!r}; {fix}")
        if parts.path.rstrip("/").endswith("/v1"):
            raise UserError(f"'backends' has the URL {self.url!r}; leave out '/v1', which is the beginning of every path that clients ask for")
        for key in ("name", "zone"):
            if not getattr(self, key).isprintable():
                raise UserError(f"'backends.{key}' is {getattr(self, key)!r}; give a name that can be printed in a line of a log")
        if not 0 < self.weight <= 1000:
            raise UserError(f"'backends.weight' of {self.label} is {self.weight:g}; it must be above 0 and at most 1000")
        if self.cache_tokens < 0:
            raise UserError(f"'backends.cache_tokens' of {self.label} is {self.cache_tokens}; it must be at least 0")
        if self.max_requests < 1:
            raise UserError(f"'backends.max_requests' of {self.label} is {self.max_requests}; it must be at least 1")
        if (self.ca_file or self.cert_file or self.cert_key_file) and parts.scheme != "https":
            raise UserError(f"backend {self.label} has certificates, and its URL begins with http://; write https://")
        if bool(self.cert_file) != bool(self.cert_key_file):
            raise UserError(f"backend {self.label} has only one of 'cert_file' and 'cert_key_file'; give both")
        if self.probe and not self.probe.startswith("/"):
            raise UserError(f"'backends.probe' of {self.label} is {self.probe!r}; it must begin with '/', for example /health")


@dataclass(frozen=True, slots=True)
class TimeoutConfig:
    """How long the gateway waits for a backend before the request is given to another one or ends with an error."""

    connect_s: float = 2.0
    """For a connection."""
    first_byte_s: float = 600.0
    """For the beginning of the answer; an answer that is not streamed begins when it is complete."""
    idle_s: float = 120.0
    """Between two parts of an answer that has begun."""

    def check(self) -> None:
        check_seconds("timeouts", self, "connect_s", "first_byte_s", "idle_s")


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """How the gateway learns which backends are ready."""

    interval_s: float = 2.0
    """Time between two probes of a backend."""
    timeout_s: float = 2.0
    """Time for its answer."""
    state_s: float = 0.5
    """Time between two looks at the KV cache and the queue of a Tandem server."""
    failures: int = 3
    """Probes in a row that are not answered until a backend is down: requests that wait for its first byte are then given to others. One that
    answers that it is not ready is given no new requests and finishes those that it has."""

    def check(self) -> None:
        check_seconds("probes", self, "interval_s", "timeout_s", "state_s")
        check_at_least_one("probes", self, "failures")


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """The circuit breaker of each backend: what Envoy calls outlier detection. Failures are broken or refused connections, timeouts and statuses
    500 to 599 except 503; neither an error of the client (400 to 499) nor a full queue (429, 503) is one."""

    failures: int = 5
    """Failures in a row that open it."""
    window: int = 20
    """Newest answers whose share of failures opens it too."""
    failure_share: float = 0.5
    """This share."""
    open_s: float = 1.0
    """Time that it stays open first. Then one request at a time tries the backend; each failure doubles the time."""
    max_open_s: float = 30.0
    """Longest time that it stays open."""
    successes: int = 2
    """Answers in a row that close it again."""
    max_share: float = 1.0
    """Share of the backends of a model that may be out at once; the breakers of further ones stay closed."""

    def check(self) -> None:
        check_at_least_one("breaker", self, "failures", "window", "successes")
        check_seconds("breaker", self, "open_s", "max_open_s")
        if not 0 < self.failure_share <= 1:
            raise UserError(f"'breaker.failure_share' is {self.failure_share:g}; it must be above 0 and at most 1")
        if not 0 < self.max_share <= 1:
            raise UserError(f"'breaker.max_share' is {self.max_share:g}; it must be above 0 and at most 1")
        if self.max_open_s < self.open_s:
            raise UserError(f"'breaker.max_open_s' is {self.max_open_s:g}, less than 'breaker.open_s' ({self.open_s:g}); make it at least that")


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """When a request that a backend failed before the first byte of its answer is given to another one."""

    attempts: int = 3
    """Backends that a request is sent to at most, the first included; 1 turns retries off."""
    budget: float = 0.2
    """Retries for each request on average, so that they do not multiply the load of backends that fail under it."""
    reserve: int = 10
    """Retries beyond the budget every ten seconds, for gateways with few requests."""
    backoff_s: float = 0.025
    """The n-th retry waits a random time of at most this long times 2^n."""

    def check(self) -> None:
        check_at_least_one("retry", self, "attempts")
        check_seconds("retry", self, "backoff_s")
        if not 0 <= self.budget <= 10 or not 0 <= self.reserve <= 10_000:
            name, high = ("reserve", 10_000) if 0 <= self.budget <= 10 else ("budget", 10)
            raise UserError(f"'retry.{name}' is {getattr(self, name)}; it must be from 0 to {high}")


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The requests that wait because their backends have `max_requests`, or no room in their KV caches. The next one is that of the tenant that has received
    the least service."""

    max_waiting: int = 1024
    """Requests that wait at most; more are refused with 429."""
    max_waiting_per_tenant: int = 256
    """Requests of one tenant that wait at most."""
    max_wait_s: float = 60.0
    """Time that a request waits at most. One that would wait longer, as far as can be seen, is refused at once."""
    follow_cache: bool = True
    """Whether requests wait here, where they are served fairly, for room in the KV caches of Tandem's servers."""

    def check(self) -> None:
        check_at_least_one("queue", self, "max_waiting", "max_waiting_per_tenant")
        check_seconds("queue", self, "max_wait_s")


LIMITS = (
    "concurrent", "requests_per_minute", "requests_per_day", "tokens_per_minute", "tokens_per_day", "input_tokens_per_minute", "input_tokens_per_day",
    "output_tokens_per_minute", "output_tokens_per_day",
)  # fmt: skip
"""The fields of ``LimitConfig``."""


@dataclass(frozen=True, slots=True)
class LimitConfig:
    """Limits of a key, a tenant or a model. A request takes its share before it is sent on, its prompt and what it may generate, and gives back what it has
    not used. Minutes and days are those of UTC."""

    requests_per_minute: int | None = None
    """Requests in a minute. Empty: no limit."""
    requests_per_day: int | None = None
    """Requests in a day."""
    tokens_per_minute: int | None = None
    """Tokens in a minute, of prompts and answers."""
    tokens_per_day: int | None = None
    """Tokens in a day."""
    input_tokens_per_minute: int | None = None
    """Tokens of prompts in a minute."""
    input_tokens_per_day: int | None = None
    """Tokens of prompts in a day."""
    output_tokens_per_minute: int | None = None
    """Tokens of answers in a minute."""
    output_tokens_per_day: int | None = None
    """Tokens of answers in a day."""
    concurrent: int | None = None
    """Requests at once."""

    def check(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"the limit '{name}' is {value}; it must be at least 1, or be left out for no limit (revoke a key to stop it)")


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """Redis (7 or later), in which several gateways count limits together. While it does not answer, each counts alone."""

    url: str = ""
    """Its address, for example `redis://10.0.0.9:6379/0`. Empty: limits are counted in the gateway."""
    prefix: str = "tandem"
    """Beginning of all keys; gateways with the same one share their limits."""
    timeout_s: float = 0.5
    """Time for an answer."""

    def check(self) -> None:
        check_no_secret("'redis.url'", self.url)
        check_seconds("redis", self, "timeout_s")
        if self.url and not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise UserError(f"'redis.url' is '{self.url}'; write redis://HOST:PORT/0, rediss:// for TLS, or unix://PATH")
        if not self.prefix or not self.prefix.isprintable() or "{" in self.prefix or "}" in self.prefix:
            raise UserError(f"'redis.prefix' is {self.prefix!r}; give a name without braces")


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """A tenant: those who share keys, a budget and a place in the queue."""

    weight: float = 1.0
    """Its share of the service beside other tenants that wait: with 2 twice as much."""
    priority: int = 0
    """Its class: requests of tenants with a lower number are served first, whatever else waits."""
    limits: LimitConfig = field(default_factory=LimitConfig)
    """Its limits, over all its keys."""
    models: Mapping[str, LimitConfig] = field(default_factory=dict)
    """Further limits of its requests for a model, by the name that clients ask for."""

    @property
    def is_limited(self) -> bool:
        return self.limits != LimitConfig() or bool(self.models)

    def check(self) -> None:
        if not 0 < self.weight <= 1000:
            raise UserError(f"the 'weight' of a tenant is {self.weight:g}; it must be above 0 and at most 1000")
        if not -1000 <= self.priority <= 1000:
            raise UserError(f"the 'priority' of a tenant is {self.priority}; it must be from -1000 to 1000")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The file of ``tandem gateway``."""

    backends: tuple[BackendConfig, ...] = ()
    """The servers behind the gateway that others have started."""
    servers: Mapping[str, ServersConfig] = field(default_factory=dict)
    """Servers that the gateway starts itself, by the name of their model for clients or, with `served_model_name`, another one."""
    host: str = "127.0.0.1"
    """Address that it listens on."""
    port: int = 8080
    """Port that it listens on; 0 takes a free one."""
    workers: int = 1
    """Processes that serve it. More than one need `redis` for limits and keys, of which they have one view there; each has its part of `max_requests` of a
    backend and of the queue, and knows the load that it gives itself (see `balance: power_of_two`)."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """TLS of that address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of load balancers in front, for example `10.0.0.0/8`. The client of a request from one of them is the one that it names in
    `X-Forwarded-For`. Without keys a client's address is its tenant."""
    zone: str = ""
    """Where the gateway runs; see `router.zone_tokens`."""
    balance: Literal["least_tokens", "power_of_two", "round_robin", "consistent_hash"] = "least_tokens"
    """Which of the backends that can serve a request gets it: the one with the fewest outstanding tokens, the better of two drawn at random, each in turn,
    or that of the request's session or prompt while it is not overloaded."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """What else is weighed."""
    routes: Mapping[str, RouteConfig] = field(default_factory=dict)
    """Names that clients ask for, with the models that answer: canary and shadow shares."""
    registry: str = ""
    """Folder of the model registry in which stages such as `NAME@production` are looked up, once a second. Empty: none."""
    max_body_mib: float = 32.0
    """Largest body of a request."""
    request_s: float = 30.0
    """Time for a client to send a request."""
    stall_s: float = 300.0
    """Time after which a client that reads nothing of its answer is disconnected."""
    drain_s: float = 600.0
    """Time for requests in flight after SIGTERM."""
    max_connections_per_client: int = 0
    """Open connections of one address; 0: no limit."""
    log_requests: bool = True
    """Whether a line is logged for each request, without prompt, answer, query or key."""
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    """Waits for backends."""
    probes: ProbeConfig = field(default_factory=ProbeConfig)
    """How backends are probed."""
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    """The circuit breakers."""
    retry: RetryConfig = field(default_factory=RetryConfig)
    """Retries."""
    hedge: HedgeConfig = field(default_factory=HedgeConfig)
    """Second attempts for short requests that take long."""

    queue: QueueConfig = field(default_factory=QueueConfig)
    """Requests that wait."""
    keys_file: str = ""
    """File of API keys, which `tandem keys` writes; requests then need one of them. Empty: no key is needed, and a tenant is a client's address."""
    oidc: OidcConfig = field(default_factory=OidcConfig)
    """Tokens in place of keys, or beside them."""
    targets_folder: str = ""
    """Folder in which the gateway is named to Prometheus (`file_sd_configs`), as in `observability.md`. Empty: none."""
    log_folder: str = ""
    """Folder in which the log is written as JSON lines too (`gateway-PORT.log`), for Loki, as in `observability.md`. Empty: standard error alone."""
    traces: TracesConfig | None = None
    """Spans of requests for an OpenTelemetry collector, as in `observability.md`. Without it there are none."""
    audit_log: str = ""
    """File to which a line of JSON is added for each request: who asked for what and what it cost, without prompt and answer. It may be moved away while the
    gateway runs."""
    audit_prompts: bool = False
    """Whether these lines have what clients sent, prompts included (`body`): whoever reads the file reads them, and it grows by all of it."""
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    """Tenants by name."""
    other_tenants: TenantConfig = field(default_factory=TenantConfig)
    """Every tenant that `tenants` does not name, each on its own."""
    model_limits: Mapping[str, LimitConfig] = field(default_factory=dict)
    """Limits of all requests for a model together, by the name that clients ask for."""
    redis: RedisConfig = field(default_factory=RedisConfig)
    """Limits of several gateways."""

    def check(self) -> None:
        """Raises ``UserError`` for values that cannot work."""
        if len(self.backends) > MOST_BACKENDS or not (self.backends or self.servers):
            raise UserError(f"'backends' has {len(self.backends)} entries; give 1 to {MOST_BACKENDS}, each with a url")
        labels = [backend.label for backend in self.backends]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"two backends have the name '{label}'; give each a name of its own ('name')")
        check_servers(self.servers, labels, self.registry)
        check_roles(self.servers, self.backends)
        self.router.check_read(self.balance, self.zone)
        check_routes(self.routes)
        if not 0 <= self.port <= 65535:
            raise UserError(f"'port' is {self.port}; it must be from 0 to 65535")
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise UserError(f"'trusted_proxies' has '{proxy}': {error}; write an address or a network, for example 10.0.0.0/8") from None
        if not 0 < self.max_body_mib <= MOST_BODY_MIB:
            raise UserError(f"'max_body_mib' is {self.max_body_mib:g}; it must be above 0 and at most {MOST_BODY_MIB}")
        for name in ("request_s", "stall_s", "drain_s"):
            if not 0 < getattr(self, name) <= 2_000_000:
                raise UserError(f"'{name}' is {getattr(self, name)}; it must be above 0 seconds, at most 2000000")
        if self.audit_prompts and not self.audit_log:
            raise UserError("'audit_prompts' is true without 'audit_log', the file that would get them; give both")
        self._check_workers()
        if self.max_connections_per_client < 0:
            raise UserError(f"'max_connections_per_client' is {self.max_connections_per_client}; it must be at least 0")

    def _check_workers(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UserError(f"'workers' is {self.workers}; it must be from 1 to {MOST_WORKERS}")
        if self.workers == 1:
            return
        if not hasattr(socket, "SO_REUSEPORT") or sys.platform != "linux":
            raise UserError(f"'workers' is {self.workers}, which needs Linux; leave it out, or start several gateways behind a load balancer")
        if self.servers:
            raise UserError(f"'workers' is {self.workers} with 'servers', which one process starts and watches; run those behind a gateway of their own, or "
                            "leave 'workers' out")  # fmt: skip
        few = next((backend for backend in self.backends if backend.max_requests < self.workers), None)
        if few is not None:
            raise UserError(f"'backends.max_requests' of {few.label} is {few.max_requests}, less than 'workers' ({self.workers}), of which each needs a part")
        counted = ["keys_file"] if self.keys_file else []
        counted += ["other_tenants"] if self.other_tenants.is_limited else []
        counted += ["tenants"] if any(tenant.is_limited for tenant in self.tenants.values()) else []
        counted += ["model_limits"] if self.model_limits else []
        if counted and not self.redis.url:
            raise UserError(f"'workers' is {self.workers} with '{counted[0]}', whose limits several processes count together in Redis alone; give 'redis.url', "
                            "or leave 'workers' out")  # fmt: skip
