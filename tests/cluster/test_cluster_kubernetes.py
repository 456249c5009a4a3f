"""What the launcher asks of Kubernetes, by the real client against a recorded API: a run is placed, shown, cancelled and continued, and what cannot be is
refused in one line with nothing left behind."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kubernetes_api import RecordedApi, kubeconfig, recorded_api
from launched_runs import TINY

from tandem.cluster.launch.record import Record, write_record

Here = Callable[..., str]
RL = Path(__file__).parents[1] / "pod" / "tiny.yaml"
DRY = ("jobset-dry-run", "secret-dry-run", "policy-dry-run")


@pytest.fixture
def api(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedApi]:
    with recorded_api(tmp_path_factory.mktemp("api")) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        monkeypatch.setattr("tandem.cluster.launch.kubernetes.launcher.secrets", SimpleNamespace(token_hex=lambda count: "a1b2c3"))
        yield api
        api.finished()


@pytest.fixture
def train(here: Here, tmp_path: Path) -> Here:
    def train(*more: str, recipe: Path = TINY, status: int = 2) -> str:
        user = f"--kubernetes.user_id={os.getuid() or 1000}"
        # A port at which there is no registry: what it has is not known then.
        image = "--kubernetes.image=127.0.0.1:1/tandem:0.1.0"
        where = ("--kubernetes.claim=runs", f"--kubernetes.mount_path={tmp_path}")
        return here("train", recipe, "--on", "kubernetes", "--run.name=job", image, *where, user, *more, refused_with=status)

    return train


def placed(folder: Path, keys: str = "{}") -> Path:
    """Returns the folder of the run ``job``, as it is after it was placed."""
    directory = folder / "runs" / "job"
    (directory / "logs").mkdir(parents=True)
    (directory / "config.yaml").write_text(f"{TINY.read_text()}\nkubernetes: {keys}\n")
    write_record(directory, Record("kubernetes", "lab/tandem-job-a1b2c3", folder=str(folder), address="lab"))
    return directory


def test_a_run_is_created_after_a_dry_run_with_what_belongs_to_it(api: RecordedApi, train: Here, tmp_path: Path) -> None:
    api.expect("claim", "queue", "cluster-queue", "nodes", *DRY, "jobset-create", "secret-create", "policy-create")
    said = train("--kubernetes.nodes=2", "--kubernetes.gpus=4", "--kubernetes.queue=train", "--kubernetes.signal_s=300", recipe=RL)
    assert said.startswith("created JobSet lab/tandem-job-a1b2c3: run runs/job\n")
    made = api.sent("POST", "jobsets")[-1]
    assert made == api.sent("POST", "jobsets?dryRun")[0] and made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "train"
    assert [(job["name"], job["replicas"]) for job in made["spec"]["replicatedJobs"]] == [("controller", 1), ("pods", 1)]
    first = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert first["terminationGracePeriodSeconds"] == 300 and first["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    tried, secret = api.sent("POST", "secrets")
    reference = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "tandem-job-a1b2c3", "uid": "8c5e1a0e-0000-4000-8000-000000000001"}
    assert secret["metadata"]["ownerReferences"] == api.sent("POST", "networkpolicies")[-1]["metadata"]["ownerReferences"] == [reference]
    # The values are in the Secret alone, and not those of the dry run.
    values = set(secret["stringData"].values())
    assert len(values) == 2 and not values & set(tried["stringData"].values()) and all(len(value) == 64 for value in values)
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or not any(value in path.read_text(errors="replace") for value in values)
    assert not any(value in json.dumps(made) for value in values)
    record = json.loads((tmp_path / "runs" / "job" / "launch" / "record.json").read_text())
    assert (record["launcher"], record["job"], record["address"], record["starts_etcd"]) == ("kubernetes", "lab/tandem-job-a1b2c3", "lab", True)


@pytest.mark.parametrize(
    ("answers", "line"),
    [
        (("jobset", "pods-running"), "running, JobSet lab/tandem-job-a1b2c3 on n1: 1 of 2 pods wait: Unschedulable: 0/4 nodes are available: 1 node(s) were "),
        (("jobset", "pods-no-image"), 'queued, JobSet lab/tandem-job-a1b2c3: ImagePullBackOff: Back-off pulling image "127.0.0.1:1/tandem:0.1.0"\n'),
        (("jobset", "pods-none"), "queued, JobSet lab/tandem-job-a1b2c3: no pod of it yet\n"),
        (("jobset-suspended", "pods-none"), "queued, JobSet lab/tandem-job-a1b2c3: it is suspended\n"),
        (("jobset-deleting", "pods-running"), "running, JobSet lab/tandem-job-a1b2c3 on n1: it was cancelled, and saves its step\n"),
        (("jobset-deleting", "pods-none"), "stopped, JobSet lab/tandem-job-a1b2c3\n"),
        (("jobset-completed", "pods-none"), "stopped, JobSet lab/tandem-job-a1b2c3\n"),
        (("jobset-failed", "pods-failed"), "failed, JobSet lab/tandem-job-a1b2c3: '/shared/runs/job' is not a run: it has no config.yaml; "),
        (("jobset-failed", "pods-none"), "failed, JobSet lab/tandem-job-a1b2c3: jobset failed due to one or more job failures\n"),
        (("jobset-gone",), "stopped, JobSet lab/tandem-job-a1b2c3, which Kubernetes no longer has\n"),
    ],
    ids=range(10),
)
def test_the_state_of_a_run_is_that_of_its_jobset_and_pods(api: RecordedApi, here: Here, tmp_path: Path, answers: tuple[str, ...], line: str) -> None:
    placed(tmp_path)
    api.expect(*answers)
    assert here("status", "runs/job").startswith(f"runs/job: {line}")


def test_a_run_that_kueue_does_not_admit_yet_says_why_and_its_outputs_are_its_logs(api: RecordedApi, here: Here, tmp_path: Path) -> None:
    placed(tmp_path, "{queue: train}")
    api.expect("jobset-suspended", "pods-none", "workloads")
    waits = "Kueue: couldn't assign flavors to pod set controller: insufficient unused quota for nvidia.com/gpu in flavor h100, 4 more needed\n"
    assert here("status", "runs/job").startswith(f"runs/job: queued, JobSet lab/tandem-job-a1b2c3: {waits}")
    (tmp_path / "runs/job/logs/kubernetes-tandem-job-a1b2c3.out").write_text("one\ntandem: the disk is full\n")
    assert here("logs", "runs/job") == "one\ntandem: the disk is full\n"
    api.expect("jobset-failed", "pods-none")
    assert here("status", "runs/job").startswith("runs/job: failed, JobSet lab/tandem-job-a1b2c3: the disk is full\n")


def test_a_run_is_cancelled_by_a_deletion_that_lets_it_save_or_at_once(api: RecordedApi, here: Here, tmp_path: Path) -> None:
    placed(tmp_path)
    api.expect("jobset", "pods-running", "jobset-delete")
    assert here("cancel", "runs/job") == "deleted JobSet lab/tandem-job-a1b2c3: its pods finish their step, which the run saves first\n"
    api.expect("jobset-deleting", "pods-running", "jobset-delete", "pods-delete")
    assert here("cancel", "runs/job", "--now") == "deleted JobSet lab/tandem-job-a1b2c3\n"
    api.expect("jobset-gone")
    assert here("cancel", "runs/job") == "the run in 'runs/job' is not running on Kubernetes, so there is nothing to cancel"


def test_a_run_that_has_ended_goes_on_in_a_new_jobset_and_the_old_one_goes(
    api: RecordedApi, train: Here, here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    api.expect("claim", "nodes", "jobset-dry-run", "policy-dry-run", "jobset-create", "policy-create", "jobset", "pods-running")
    train()
    assert "is running as JobSet lab/tandem-job-a1b2c3 on n1; wait for it, or end it first:" in here("resume", "runs/job")
    monkeypatch.setattr("tandem.cluster.launch.kubernetes.launcher.secrets", SimpleNamespace(token_hex=lambda count: "d4e5f6"))
    api.expect("jobset-failed", "pods-none", "claim", "nodes", "jobset-dry-run", "policy-dry-run", "jobset-create", "policy-create", "jobset-delete")
    assert here("resume", "runs/job", "--kubernetes.signal_s=30").startswith("created JobSet lab/tandem-job-d4e5f6: run runs/job\n")
    made = api.sent("POST", "jobsets")[-1]
    assert made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30
    record = json.loads((tmp_path / "runs/job/launch/record.json").read_text())
    assert record["job"] == "lab/tandem-job-d4e5f6" and record["overrides"] == ["--kubernetes.signal_s=30"]


REFUSED = [
    (("claim-missing",), (), "'kubernetes.claim' is 'runs', and namespace lab has no PersistentVolumeClaim of this name"),
    (("claim-unauthorized",), (), "the API server URL does not take these credentials (401, read PersistentVolumeClaim runs); log in again"),
    (("claim", "kueue-missing"), ("queue=train",), "'kubernetes.queue' is 'train', and this cluster has no Kueue; install it, or remove the key"),
    (("claim", "queue-missing", "queues"), ("queue=tarin",), "'kubernetes.queue' is 'tarin', which namespace lab does not have; did you mean 'train'?"),
    (("claim", "queue-inactive"), ("queue=train",), "queue 'train' is not active: Can't submit new workloads to clusterQueue; choose another kubernetes.queue"),
    (("claim", "queue", "cluster-queue"), ("queue=train", "nodes=2", "gpus=8"), "2 nodes with 'kubernetes.gpus' 8 are 16 of nvidia.com/gpu, and queue"),
    (("claim", "nodes"), ("gpus=16",), "'kubernetes.gpus' is 16, and no node has more than 8 (nvidia.com/gpu); lower it, or set kubernetes.cluster_autoscaler"),
    (("claim", "nodes"), ("nodes=4",), "'kubernetes.nodes' is 4, and the cluster has 3 nodes that take pods; lower it, or set kubernetes.cluster_autoscaler"),
    (("claim", "nodes"), ("nodes=3", "gpus=8"), "'kubernetes.nodes' is 3, and 2 nodes have 8 nvidia.com/gpu; lower it,"),
    (("claim", "nodes"), ("memory=2000Gi",), "'kubernetes.memory' is 2000Gi, and no node has more than 1031.0 GiB (memory); lower it,"),
    (("claim", "nodes"), ("rdma_resource=rdma/hca",), "'kubernetes.rdma_resource' is rdma/hca, and no node has any (rdma/hca); lower it,"),
    (("claim", "nodes-forbidden", "jobset-unknown"), (), "this cluster has no JobSet (jobset.x-k8s.io/v1alpha2); install it,"),
    (("claim", "nodes", "no-namespace"), (), "'kubernetes.namespace' is 'lab': Kubernetes cannot create JobSet tandem-job-a1b2c3: namespaces"),
    (("claim", "nodes", "jobset-forbidden"), (), "you may not create JobSet tandem-job-a1b2c3: jobsets.jobset.x-k8s.io is forbidden: User"),
    (("claim", "nodes", *DRY, "jobset-exists"), ("nodes=2",), "Kubernetes refused to create JobSet tandem-job-a1b2c3: jobsets.jobset.x-k8s.io \"tandem-job"),
    (
        ("claim", "nodes", *DRY, "jobset-create", "secret-over-quota", "jobset-delete", "pods-delete"), ("nodes=2",),
        "Kubernetes refused to create Secret tandem-job-a1b2c3: secrets \"tandem-job-a1b2c3\" is forbidden: exceeded quota: objects,",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "keys", "line"), REFUSED, ids=range(len(REFUSED)))
def test_what_the_cluster_does_not_have_is_refused_in_one_line_and_leaves_nothing(
    api: RecordedApi, train: Here, tmp_path: Path, answers: tuple[str, ...], keys: tuple[str, ...], line: str
) -> None:
    api.expect(*answers)
    recipe = RL if any("nodes=" in key for key in keys) else TINY
    assert train(*(f"--kubernetes.{key}" for key in keys), recipe=recipe).startswith(line.replace("URL", api.url))
    assert list(tmp_path.iterdir()) == []


def test_an_api_server_that_does_not_answer_or_is_not_there_is_named(api: RecordedApi, train: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = "read PersistentVolumeClaim runs"
    monkeypatch.setattr("tandem.cluster.launch.kubernetes.api._TIMEOUT_S", (2.0, 0.3))
    api.expect("claim-late", "claim-unavailable")
    assert train(status=1) == f"the API server {api.url} did not answer in time ({read}); try again"
    assert train(status=1) == f"the API server {api.url} could not {read} (503: the server is currently unable to handle the request); try again"
    assert list(tmp_path.iterdir()) == []
    config = kubeconfig("https://127.0.0.1:1", api.kubeconfig.with_name("ca.crt"), {"token": "x"})
    api.kubeconfig.write_text(yaml.safe_dump(config))
    assert train().startswith("the API server https://127.0.0.1:1 is not reached (read PersistentVolumeClaim runs: ")
    # An authority that is not the server's.
    foreign = {**kubeconfig(api.url, api.kubeconfig.with_name("server.crt"), {"token": "x"})}
    foreign["clusters"][0]["cluster"]["tls-server-name"] = "elsewhere"
    api.kubeconfig.write_text(yaml.safe_dump(foreign))
    assert "is not reached" in train()


def test_what_may_have_been_created_without_an_answer_is_deleted_or_named(api: RecordedApi, train: Here, tmp_path: Path) -> None:
    looked = ("claim", "nodes", "jobset-dry-run", "policy-dry-run", "jobset-create-unavailable")
    api.expect(*looked, "jobset-delete", "pods-delete")
    assert train(status=1).startswith(f"the API server {api.url} could not create JobSet tandem-job-a1b2c3 (504: the server was unable to return")
    api.expect(*looked, "jobset-delete-forbidden")
    assert "; delete what may be left of it: kubectl delete jobset tandem-job-a1b2c3 --namespace lab (you may not delete" in train(status=1)
    assert list(tmp_path.iterdir()) == []


def test_a_kubeconfig_that_is_missing_damaged_or_gives_no_credentials_is_named(
    api: RecordedApi, train: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = train("--kubernetes.context=othre")
    assert refused == f"'kubernetes.context' is 'othre', which the kubeconfig ({api.kubeconfig}) does not have; did you mean 'other'?"
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false", "interactiveMode": "Never"}}
    api.kubeconfig.write_text(yaml.safe_dump(kubeconfig(api.url, api.kubeconfig.with_name("ca.crt"), user)))
    assert train().startswith("the kubeconfig gives no credentials: ")
    api.kubeconfig.write_text("a: [")
    assert train().startswith(f"the kubeconfig '{api.kubeconfig}' is damaged: while parsing a flow node")
    api.kubeconfig.write_text("[1, 2]")
    assert train().startswith(f"the kubeconfig '{api.kubeconfig}' is damaged: ")
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert train().startswith("no cluster: Invalid kube-config file. No configuration found, and this is not a pod; set KUBECONFIG,")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (("image=",), "'kubernetes.image' is empty, and a run on Kubernetes needs it; set it, for example --kubernetes.image=registry.example.com/"),
        (("claim=",), "'kubernetes.claim' is empty"),
        (("mount_path=/shared",), "the run's folder is 'FOLDER/runs/job', which is not under kubernetes.mount_path ('/shared'), so no pod has it;"),
        (("mount_path=shared",), "'kubernetes.mount_path' is 'shared'; give the absolute path of a folder"),
        (("namespace=A_b",), "'kubernetes.namespace' is 'A_b', which is not a name of Kubernetes"),
        (("memory=64GB",), "'kubernetes.memory' is '64GB', which is not a quantity of Kubernetes; write 16, 500m or 64Gi"),
        (("cpu=0",), "'kubernetes.cpu' is '0', which is not a quantity"),
        (("gpus=-1",), "'kubernetes.gpus' is -1; it must be between 0 and 1024"),
        (("nodes=0",), "'kubernetes.nodes' is 0; it must be at least 1"),
        (("nodes=2",), "'kubernetes.nodes' is 2 and 'parallel.data' 1, which 2 nodes with ranks do not divide"),
        (("gpu_resource=gpu",), "'kubernetes.gpu_resource' is 'gpu', which is not a name of an extended resource"),
        (("node_selector=[gpu]",), "'kubernetes.node_selector' has 'gpu'; write each label as KEY=VALUE"),
        (("tolerations=['a=b:Sometimes']",), "'kubernetes.tolerations' has 'a=b:Sometimes'; write each taint as KEY=VALUE:EFFECT"),
        (("image=a b",), "'kubernetes.image' is 'a b'; write it as REGISTRY/NAME:TAG"),
        (("imgae=a",), "unknown key 'kubernetes.imgae'"),
    ],
)
def test_a_section_with_which_nothing_can_be_placed_is_refused_without_a_cluster(train: Here, tmp_path: Path, keys: tuple[str, ...], line: str) -> None:
    assert train("--dry-run", *(f"--kubernetes.{key}" for key in keys)).startswith(line.replace("FOLDER", str(tmp_path)))
