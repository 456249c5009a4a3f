"""The gateway's OpenAPI description under schemathesis."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from gateway_process import Gateway, gateway, until
from smuggling import RecordingBackend

from tandem.gateway.keys import new_key, write_keys

EXCLUDED = "positive_data_acceptance"
"""Names of models and backends are refused with 404 although the schema allows them."""


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, str]]:
    """A gateway with the key of an administrator, before a backend that answers everything."""
    folder, backend = tmp_path_factory.mktemp("schema"), RecordingBackend()
    key, record = new_key("operators", role="admin")
    write_keys(folder / "keys.json", {record.id: record})
    with gateway(folder, [backend], keys_file=str(folder / "keys.json")) as running:  # type: ignore[list-item]
        yield running, key
    backend.close()


def fuzz(described: tuple[Gateway, str], examples: int, seed: int) -> None:
    running, key = described
    command = [
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{running.url}/openapi.json", "--checks", "all",
        "--exclude-checks", EXCLUDED, "--max-examples", str(examples), "--seed", str(seed), "--phases", "examples,coverage,fuzzing", "--header",
        f"Authorization: Bearer {key}", "--request-timeout", "60", "--max-response-time", "60", "--no-color", "--generation-database", "none",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, cwd=running.log.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    until(lambda: running.metric("open_requests") == running.metric("reservations") == 0, "the gateway to be idle")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_schemathesis_finds_nothing_in_the_gateway(described: tuple[Gateway, str], seed: int) -> None:
    fuzz(described, 100, seed)


def test_the_description_names_every_path_and_other_methods_are_405(described: tuple[Gateway, str]) -> None:
    running, key = described
    headers = {"Authorization": f"Bearer {key}"}
    said = running.get("/openapi.json").json()
    paths, schemas = said["paths"], said["components"]["schemas"]
    for path, methods in paths.items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            answer = running.client.request(method, running.url + path.replace("{model}", "m"), json={}, headers=headers)
            assert (answer.status_code == 405) == (method.lower() not in methods), (method, path, answer.status_code)
            if answer.status_code == 405:
                assert set(answer.headers["allow"].lower().split(", ")) - {"head"} == set(methods)
                form = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == form
                [described_by] = {of["responses"]["405"]["content"]["application/json"]["schema"]["$ref"].split("/")[-1] for of in methods.values()}
                schema = schemas[described_by]
                assert set(schema["properties"]["error"]["required"]) == form and set(schema["required"]) <= set(answer.json()) <= set(schema["properties"])
