"""Section ``pods``: how many pods draw the samples of a run, and who starts them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tandem.config.addresses import check_no_secret
from tandem.config.coordination import CoordinationConfig
from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.parallel import ParallelConfig, how_to_divide, pods_of_a_replica
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe

_OF_TLS = ("tls_cert_file", "tls_key_file", "tls_ca_file")
_OF_JOINING = ("min_count", "join_timeout_s", "heartbeat_timeout_s", "host", "port", "credential_file", *_OF_TLS)
_OF_DELTAS = ("elementwise_deltas", "full_update_every")
_OF_PODS = ("protocols", "peer_to_peer", "pipeline")


@dataclass(frozen=True, slots=True)
class PodsConfig:
    """The pods of a run. The first `trainer_count` train; every one has a rollout sidecar with `rollout.workers` workers. See `hybrid.md`, Many pods."""

    count: int = 1
    """Number of pods that the run starts on its own machine. The samples are the same for any number."""
    trainer_count: int = 1
    """Pods that train, as `nnodes` of verl and `actor-num-nodes` of slime: each has the ranks of `parallel.data` / `trainer_count` data-parallel replicas, and
    gives its engines their weights through its own shared memory. Those of `count` come first, then pods that joined and have the run's folder. Of a run on
    data: its machines, of which all but the first join, each with such a share of the ranks or, where the number is a multiple of `parallel.data`, with some
    of the pipeline stages of one replica (`training.md`)."""
    min_count: int = 1
    """A rollout waits until so many pods are there, those of `count` included, as the minimum of `torchrun --nnodes=MIN:MAX`."""
    max_count: int = 0
    """The most pods, those of `count` included, as the maximum of `torchrun --nnodes=MIN:MAX`. The others are started elsewhere by `tandem pod` and join and
    leave between iterations; one more than this waits until another leaves. 0: `count`, so none can join; in a run on data `trainer_count`."""
    join_timeout_s: float = 600.0
    """Seconds that a rollout waits for `min_count` pods, and a pod for the run. Then they end."""
    heartbeat_timeout_s: float = 30.0
    """A pod that joined and is silent for so many seconds is left out. It sends a heartbeat every second."""
    host: str = "127.0.0.1"
    """Address of this machine that the other pods connect to. It is listened on. Each machine sets its own."""
    port: int = 0
    """Port on `host`: of the run for its weights, of `tandem pod` for calls. 0: any free one."""
    credential_file: str = ""
    """File with the secret that all pods of the run share, readable by its owner only; for example a mounted Kubernetes secret."""
    tls_cert_file: str = ""
    """File with the certificate of this machine, in PEM. With it calls and weights between pods are encrypted (TLS 1.3), and every pod shows a certificate of
    its own to every other (mutual TLS), beside the secret. All machines of a run have one, or none. Files that are renewed are read again. Empty: plain TCP."""
    tls_key_file: str = ""
    """File with the private key of that certificate, in PEM, not encrypted."""
    tls_ca_file: str = ""
    """File with the certificates of the authorities of the pods, in PEM. Whoever has a certificate of theirs is taken for a pod, whatever its name is, so let
    them sign for pods alone."""
    protocols: tuple[Literal["rdma", "mooncake", "tcp"], ...] = ("tcp",)
    """How the trainer's pod serves its weights. Each other pod takes the first of `rdma`, `mooncake` (Mooncake over TCP) and `tcp` that both have; the first
    two need the extra `mooncake`."""
    peer_to_peer: bool = False
    """Pods send on the weights that they have received, at any free port of their `host`: new weights go to one pod, then from two to two more, from four to
    four more, so that the trainer's pod does not send them once for each. Over plain TCP; pods that read over `rdma` or `mooncake` read from the trainer's."""
    pipeline: Literal["auto", "always", "never"] = "auto"
    """Whether pods begin to read a version while the trainer registers it, each part as soon as it is written. It is verified and used as without: when it is
    published whole. `auto`: pods of other machines do; those of the run's own machine would take its cores from the trainer. Where memory is short, over `rdma`
    and `mooncake`, and with `elementwise_deltas` pods read after the publication; with `peer_to_peer` the first one alone reads before."""
    elementwise_deltas: bool = False
    """Send other pods the positions and new values of the elements that have changed since the version before, where that is smaller: in bf16 at the learning
    rates of reinforcement learning about 2 % of the weights' bytes. Every tensor is compared with its digest, and read whole where that is not right. Needs
    the extra `deltas` (numpy), and `tcp` in `protocols`, over which deltas are sent."""
    full_update_every: int = 20
    """With `elementwise_deltas`: each step that is a multiple of it sends what has changed whole, so that no more than so many versions follow from each
    other."""

    weights_url: str = ""
    """With `elementwise_deltas`: a folder or an object storage (`s3://bucket/runs/sort`), one for each run, to which every version is written: a whole one
    every `full_update_every` versions, and between them what has changed. Pods that join from other machines read the weights there, and from the trainer's
    pod where that fails; servers that follow it (`tandem serve MODEL --follow URL`) need nothing else of the run. Empty: nothing is written."""

    @property
    def may_join(self) -> bool:
        """Whether pods that are started elsewhere may join."""
        return self.max_count > self.count

    @property
    def are_several(self) -> bool:
        """Whether there may be more than one pod."""
        return self.count > 1 or self.may_join

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("pods", self, "count", "trainer_count", "min_count", "full_update_every")
        check_seconds("pods", self, "join_timeout_s", "heartbeat_timeout_s")
        if self.max_count and self.max_count < self.count:
            raise UserError(
                f"'pods.max_count' is {self.max_count} and pods.count {self.count}, the pods that the run starts itself; raise max_count or leave it out"
            )
        if not self.protocols:
            raise UserError("'pods.protocols' is empty, so no other pod could receive weights; leave it out for plain TCP")
        check_no_secret("'pods.weights_url'", self.weights_url)
        if not self.are_several:
            fix = "set pods.count or pods.max_count to more than 1"
            refuse_unread("pods", self, "the run has one pod", *_OF_PODS, *(() if self.weights_url else _OF_DELTAS), fix=fix)
        if not self.elementwise_deltas:
            refuse_unread("pods", self, "pods.elementwise_deltas is false", "full_update_every", "weights_url", fix="set pods.elementwise_deltas to true")
        elif "tcp" not in self.protocols:
            served = ", ".join(self.protocols)
            raise UserError(f"'pods.elementwise_deltas' is true and pods.protocols is [{served}]; deltas are sent over plain TCP: add tcp to pods.protocols")
        if not self.may_join:
            reason = f"no pod can join, because pods.max_count is {self.max_count} and pods.count {self.count}"
            refuse_unread("pods", self, reason, *_OF_JOINING, fix="set pods.max_count to more than pods.count")
            return
        if self.min_count > self.max_count:
            raise UserError(f"'pods.min_count' is {self.min_count} and pods.max_count {self.max_count}; lower one or raise the other")
        if not 0 <= self.port <= 65535:
            raise UserError(f"'pods.port' is {self.port}; it must be a port, 1 to 65535, or 0 for any free one")
        if self.host in ("", "0.0.0.0", "::"):
            raise UserError(f"'pods.host' is '{self.host}', which no other machine can connect to; give an address of this machine")
        self._check_tls()
        if not self.credential_file:
            raise UserError(
                f"'pods.max_count' is {self.max_count}, so pods can join, and 'pods.credential_file' is not given; make the secret that they show: "
                "(umask 077; openssl rand -hex 32 > pods.secret)"
            )

    def _check_tls(self) -> None:
        given = [name for name in _OF_TLS if getattr(self, name)]
        if given and len(given) < len(_OF_TLS):
            missing = " and ".join(f"'pods.{name}'" for name in _OF_TLS if name not in given)
            raise UserError(f"'pods.{given[0]}' is given without {missing}; pods show each other certificates: give all three, or none")
        if not given:
            return
        if unencrypted := [protocol for protocol in self.protocols if protocol != "tcp"]:
            raise UserError(
                f"'pods.tls_cert_file' is given and pods.protocols has {unencrypted[0]}, which encrypts nothing; set pods.protocols to [tcp], or leave the "
                "certificates out and keep the pods in a private network"
            )
        if self.trainer_count > 1:
            raise UserError(
                f"'pods.tls_cert_file' is given and pods.trainer_count is {self.trainer_count}: the sums of gradients between trainer pods are not encrypted "
                "in this version; set pods.trainer_count to 1, or leave the certificates out and keep the pods in a private network"
            )


def check_trainer_pods(pods: PodsConfig, parallel: ParallelConfig, *, divides_replicas: bool = False) -> None:
    """Raises ``UserError`` unless every pod that trains can hold whole data-parallel replicas of the model or, with ``divides_replicas``, whole pipeline
    stages of one."""
    count = pods.trainer_count
    given = f"'pods.trainer_count' is {count}"
    if count > max(pods.count, pods.max_count):
        most = f"pods.max_count {pods.max_count}" if pods.may_join else f"pods.count {pods.count}"
        raise UserError(f"{given} and {most}; lower it, or raise {most.split()[0]}")
    over = pods_of_a_replica(parallel.data, parallel.pipeline, count)
    if over != 1 and not divides_replicas:
        why = ", because pipeline stages over several pods are for runs on data in this version" if parallel.pipeline > 1 else ""
        raise UserError(f"{given}, which does not divide parallel.data {parallel.data}: a pod has whole replicas{why}; set parallel.data to a multiple")
    if not over:
        raise UserError(
            f"{given}, which divides neither parallel.data {parallel.data} nor the stages (parallel.pipeline {parallel.pipeline}) of each replica evenly; "
            f"{how_to_divide(parallel.data, count)}"
        )
    if parallel.zero == 3:
        raise UserError(f"{given} with parallel.zero 3, which gathers every layer's weights from all data-parallel ranks; set parallel.zero to 2 or less")
    replicas = parallel.data // count if over == 1 else 1
    if replicas * parallel.context % parallel.expert:
        raise UserError(
            f"{given} with parallel.expert {parallel.expert}, so that a pod of {replicas} data-parallel rank{'' if replicas == 1 else 's'} would not have all "
            "experts; lower one of the two or raise parallel.data"
        )
    if parallel.ranks_per_node:
        raise UserError(f"{given} with parallel.ranks_per_node {parallel.ranks_per_node}; a pod has world / trainer_count ranks: leave ranks_per_node out")


def check_joining_pods(pods: PodsConfig, coordination: CoordinationConfig, run_name: str) -> None:
    """Raises ``UserError`` unless pods which are started elsewhere find the run ``run_name``."""
    given = f"'pods.max_count' is {pods.max_count} and pods.count {pods.count}, so pods can join from other machines"
    if coordination.store == "embedded":
        raise UserError(f"{given}, which reach no 'embedded' store; set coordination.store to etcd")
    if not run_name:
        raise UserError(f"{given}, which find a run by its name; set run.name")


def check_pods(recipe: "Recipe") -> None:
    """Checks that every worker of every pod has something to draw, and that the pods have what they compute on."""
    workers, prompts = recipe.pods.count * recipe.rollout.workers, recipe.rollout.prompts_per_step
    if recipe.pods.count > 1 and workers > prompts:
        raise UserError(
            f"'pods.count' is {recipe.pods.count} with rollout.workers {recipe.rollout.workers} each, and rollout.prompts_per_step is {prompts}; the samples "
            f"of a prompt stay on one worker, so {workers - prompts} would have nothing to do: lower one of the two or raise prompts_per_step"
        )
    if recipe.pods.count > 1 and recipe.machine.device == "cuda":
        raise UserError(
            f"'pods.count' is {recipe.pods.count} with machine.device cuda; the pods of one machine compute on its CPUs in this version: set "
            "rollout.workers, which has GPUs for each, and pods.count to 1"
        )
    if recipe.pods.trainer_count > 1:
        check_trainer_pods(recipe.pods, recipe.parallel)
    if recipe.pods.trainer_count > 1 and recipe.trainer.backend != "tandem":
        raise UserError(
            f"'pods.trainer_count' is {recipe.pods.trainer_count} with trainer.backend {recipe.trainer.backend}, whose ranks are in one pod in this version; "
            "set pods.trainer_count to 1"
        )
    if recipe.pods.may_join:
        check_joining_pods(recipe.pods, recipe.coordination, recipe.run.name)
