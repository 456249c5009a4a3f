"""Whether an object is one of Kubernetes: built-in kinds by ``kubernetes-validate``, custom resources by the schemas of their published definitions."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

VERSION = "1.34"
# It reads a file of a megabyte for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
_SCHEMAS = Path(__file__).parent / "schemas"
_GROUPS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "ScaledObject": "keda.sh/v1alpha1",
    "LocalQueue": "kueue.x-k8s.io/v1beta1", "ClusterQueue": "kueue.x-k8s.io/v1beta1", "ResourceFlavor": "kueue.x-k8s.io/v1beta1",
}  # fmt: skip


def check(manifest: dict[str, Any]) -> None:
    """Raises if ``manifest`` has a field that its kind does not know, or one of the wrong type, or lacks one."""
    kind = manifest["kind"]
    if kind not in _GROUPS:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    assert manifest["apiVersion"] == _GROUPS[kind]
    _validator(kind).validate(manifest)
    for inner in _inside(kind, manifest["spec"]):
        kubernetes_validate.validate(inner, VERSION, strict=True)


def _inside(kind: str, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the templates of a custom resource as the objects that its controller makes of them."""
    if kind == "JobSet":
        for job in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": job["template"].get("metadata", {}), "spec": job["template"]["spec"]}
    if kind == "LeaderWorkerSet":
        for name in ("leaderTemplate", "workerTemplate"):
            if name in spec["leaderWorkerTemplate"]:
                yield {"apiVersion": "v1", "kind": "Pod", **spec["leaderWorkerTemplate"][name]}


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((_SCHEMAS / f"{kind.lower()}.json").read_text(encoding="utf-8")))
