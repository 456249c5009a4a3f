"""Megatron's distributed checkpoints, written and read by Megatron-Core itself. Where its environment is missing, the proofs with it are skipped by name."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
from pathlib import Path

import megatron_environment
import pytest
import torch
from meshes_of_steps import MODELS, make_folder
from real_megatron import needs_megatron
from safetensors.torch import load_file, save_file

from tandem.backends.environment import FOLDER, tandem_path
from tandem.jobs.convert import convert, layout_of
from tandem.layout.mesh import MeshShape
from tandem.model.megatron.dist_files import open_dist_checkpoint
from tandem.types import UserError

LIMIT_S = 500
class Harmful:
    """Removes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.rmdir, ("/nowhere",)


def test_a_file_of_places_that_names_anything_else_is_refused_and_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    for content, message in ((pickle.dumps(Harmful()), r"has an object of 'posix.rmdir'"), (b"", "damaged or missing"), (None, "damaged or missing")):
        (tmp_path / ".metadata").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=message) as raised:
            open_dist_checkpoint(tmp_path)
        assert "\n" not in str(raised.value)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match="has the format 'zarr'; only 'torch_dist'"):
        open_dist_checkpoint(tmp_path)


def test_without_the_environment_a_conversion_is_refused_with_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "none"))
    model = make_folder(tmp_path / "model", "qwen3")
    with pytest.raises(UserError, match="tandem sidecar install megatron"):
        convert(model, tmp_path / "checkpoint", to="megatron-dist")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize(
    "name, shape",
    [
        ("qwen3", MeshShape(tensor=2, pipeline=2)), ("qwen3_moe", MeshShape(data=2, expert=2)), ("dense_first", MeshShape(data=2, pipeline=2, expert=2)),
        ("deepseek_v3", MeshShape(tensor=2, pipeline=2)), ("qwen2_moe", MeshShape(data=2, expert=2)),
    ],
    ids=str,
)  # fmt: skip
def test_any_mesh_of_megatron_loads_what_was_converted_and_what_it_saves_is_converted_back_bit_for_bit(
    name: str, shape: MeshShape, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecars = megatron_environment.make(tmp_path_factory.mktemp("sidecars"))
    monkeypatch.setenv(FOLDER, str(sidecars))
    model, has_experts = make_folder(tmp_path / "model", name), MODELS[name].experts is not None
    weights = load_file(model / "model.safetensors")
    convert(model, tmp_path / "converted", to="megatron-dist")
    assert layout_of(tmp_path / "converted") == "megatron-dist" and (tmp_path / "converted" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    saved = tmp_path / "saved" / "iter_0000007"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("7\n")
    given = {
        "model": str(model), "run": str(tmp_path), "rendezvous": str(tmp_path / "meet"), "read": str(tmp_path / "converted" / "release"), "write": str(saved),
        "experts": has_experts, "shape": {axis: getattr(shape, axis) for axis in ("data", "tensor", "pipeline", "expert")},
    }  # fmt: skip
    script, python = Path(__file__).with_name("megatron_dist_ranks.py"), sidecars / "megatron" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": tandem_path(tmp_path), "OMP_NUM_THREADS": "1"}
    logs = [(tmp_path / f"{rank}.log").open("w+", encoding="utf-8") for rank in range(shape.world)]
    # Megatron's processes for writing may outlive a rank, so ranks have files and not pipes, and process groups that end with them.
    ranks = [
        subprocess.Popen(
            [str(python), "-W", "ignore", str(script), json.dumps(given | {"rank": rank, "out": str(tmp_path / f"{rank}.pt")})],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [rank.wait(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    assert codes == [0] * shape.world, "\n".join((tmp_path / f"{rank}.log").read_text()[-3000:] for rank in range(shape.world))
    seen = set()
    for rank in range(shape.world):
        for tensor, start, stop, held in torch.load(tmp_path / f"{rank}.pt"):
            assert torch.equal(held, weights[tensor][tuple(map(slice, start, stop))]), tensor
            seen.add(tensor)
    assert seen == weights.keys()
    (tmp_path / "saved" / "huggingface").mkdir()
    (tmp_path / "saved" / "huggingface" / "config.json").write_text((model / "config.json").read_text())
    convert(tmp_path / "saved", tmp_path / "back", to="huggingface")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[each], weights[each]) for each in weights)


@needs_megatron
@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_a_checkpoint_in_bf16_keeps_its_dtypes_and_one_of_another_model_is_refused(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(megatron_environment.make(tmp_path_factory.mktemp("sidecars"))))
    model = make_folder(tmp_path / "model", name)
    # The biases of routers are in fp32 in the published folders, too, and a third is none of bf16's numbers.
    weights = {
        each: torch.full_like(tensor, 1 / 3) if each.endswith("e_score_correction_bias") else tensor.bfloat16()
        for each, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(weights, model / "model.safetensors")
    convert(model, tmp_path / "converted", to="megatron-dist")
    convert(tmp_path / "converted", tmp_path / "back", to="huggingface")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[each], weights[each]) and back[each].dtype == weights[each].dtype for each in weights)
    other = make_folder(tmp_path / "other", "qwen3")
    with pytest.raises(UserError, match="of another model than its config") as raised:
        convert(tmp_path / "converted", tmp_path / "wrong", to="huggingface", config=other)
    assert "\n" not in str(raised.value) and not (tmp_path / "wrong").exists()
