"""The page that is emitted with a topology: what is where, and how it is started, in order."""

FIGURES = {
    "inference": (
        "clients -> load balancer (Envoy) -> {gateways} gateways -> {instances} engine instances of '{model}', {parallel} GPUs each, with Prometheus, Jaeger "
        "and Loki"
    ),
    "training": (
        "head node (job scheduler, cluster manager, health monitor, metric collector, metrics database), storage nodes, {nodes} GPU nodes with {has}"
    ),
}  # fmt: skip
HOW = {
    ("inference", "kubernetes"): """\
Needs LeaderWorkerSet, KEDA, the device plugins of the GPUs, and a class of storage that is ReadWriteMany. A model of the Hub is
loaded to the claim; for a gated one the token is in a Secret: `kubectl create secret generic hugging-face --from-file=token --namespace {namespace}`.

    kubectl apply -f namespace.yaml
    kubectl apply -f .
    kubectl get leaderworkerset,pods --namespace {namespace}
    kubectl port-forward --namespace {namespace} service/envoy {port}:80
    kubectl port-forward --namespace {namespace} service/grafana 3000:3000

Grafana has its data sources and the dashboards; its first user and password are both `admin`, so change it, and no pod reaches it. The dashboards have the
label that the sidecar of Grafana's chart looks for, for a Grafana of yours.""",
    ("inference", "slurm"): """\
    bash -n inference.sbatch && sbatch --test-only inference.sbatch
    sbatch inference.sbatch
    cat logs/slurm-JOB.out              the addresses of Envoy and the gateways

Prometheus, Jaeger and Loki: `tandem up observability --targets-folder targets --log-folder logs` on a machine that has this folder; engines and gateways
name themselves in `targets`.""",
    ("inference", "local"): """\
    ./start.sh                          Ctrl-C ends all of it

Prometheus, Jaeger and Loki: `tandem up observability --targets-folder targets --log-folder logs`.""",
    ("inference", "ray"): """\
    ray up cluster.yaml                 on a cluster that exists: leave it out
    RAY_ADDRESS=HEAD:6379 ./start.sh    on the head node; Ctrl-C ends engines and gateways

Engines are replicas of Ray Serve, which has one configuration for a cluster: other applications of this cluster's Serve would be replaced. Every node has
`tandem-rl[ray,serve,gateway]` and `ray[serve]` in the Python of its Ray. Prometheus, Jaeger and Loki: `tandem up observability --targets-folder targets
--log-folder logs`.""",
    ("training", "kubernetes"): """\
Needs JobSet and Kueue, a class of storage that is ReadWriteMany, and the device plugins of GPUs and RDMA.

    kubectl apply -f namespace.yaml
    kubectl apply -f storage.yaml -f queues.yaml -f etcd.yaml -f access.yaml -f prometheus.yaml -f jaeger.yaml -f loki.yaml -f dashboards.yaml
    kubectl create -f submit.yaml       makes the JobSet of the run
    kubectl logs --namespace {namespace} job/submit
    kubectl port-forward --namespace {namespace} service/grafana 3000:3000

Grafana has its data sources and the dashboards; its first user and password are both `admin`, so change it, and no pod reaches it.""",
    ("training", "slurm"): """\
    storage/                            exports of the storage nodes, and the mounts of all others
    nodes.conf, gres.conf               parts of Slurm's own configuration
    ./head.sh                           on the head node, beside slurmctld, by its service manager
    sbatch preflight.sbatch             measures the GPU nodes
    ./submit.sh                         the run; `tandem status`, `logs` and `cancel` follow it""",
    ("training", "ray"): """\
    storage/                            exports of the storage nodes, and the mounts of all others
    ray up cluster.yaml
    ./head.sh                           on the head node, by its service manager
    ./submit.sh                         the run, on the head node; `tandem status`, `logs` and `cancel` follow it""",
    ("training", "local"): """\
    ./submit.sh                         the run, in this terminal
    tandem up observability --targets-folder targets     what watches over it""",
}  # fmt: skip


def readme(topology: str, launcher: str, facts: dict[str, object]) -> str:
    """Returns the text of ``README.md``."""
    title = f"# {topology.capitalize()} on {launcher.capitalize() if launcher != 'local' else 'one machine'}"
    return f"{title}\n\n{FIGURES[topology].format(**facts)}\n\n{HOW[topology, launcher].format(**facts)}\n"
