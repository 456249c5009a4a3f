"""The build of the C++ kernels and its cache."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tandem.kernels import cpu, select, why_reference
from tandem.kernels.cpu import build
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.cpu.library import Library
from tandem.types import RunError, UserError


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCES", source)
    return source


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_the_second_use_finds_the_first_ones_library(small_source: Path, tmp_path: Path) -> None:
    first = build.built_library("g++", tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert build.built_library("g++", tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    assert answer(first) == 42


def test_a_terminal_of_another_width_or_language_finds_the_same_library(small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = set()
    for width, language in (("60", "C.UTF-8"), ("210", "C"), ("80", "de_DE.UTF-8")):
        monkeypatch.setenv("COLUMNS", width)
        monkeypatch.setenv("LC_ALL", language)
        paths.add(build.built_library("g++", tmp_path / "cache"))
    assert len(paths) == 1


def test_a_changed_source_is_another_library(small_source: Path, tmp_path: Path) -> None:
    first = build.built_library("g++", tmp_path / "cache")
    (small_source / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    second = build.built_library("g++", tmp_path / "cache")
    assert (answer(first), answer(second)) == (42, 43)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_library_is_built_again(small_source: Path, tmp_path: Path, damage: str) -> None:
    path = build.built_library("g++", tmp_path / "cache")
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"cut": data[:middle], "flip": flipped, "empty": b""}[damage])
    assert not build.is_intact(path)
    assert build.built_library("g++", tmp_path / "cache") == path
    assert build.is_intact(path)
    assert answer(path) == 42


def test_of_builders_at_the_same_time_one_compiles_and_the_others_wait(small_source: Path, tmp_path: Path) -> None:
    compiler, found = tmp_path / "compiler", list[Path]()
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path / "calls"}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    builders = [
        threading.Thread(target=lambda: found.append(build.built_library(str(compiler), tmp_path / "cache"))) for _ in range(3)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert build.is_intact(found[0])
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [found[0].name]
    assert sum("answer.cpp" in call for call in (tmp_path / "calls").read_text().splitlines()) == 1


def test_a_builder_that_is_killed_keeps_no_other_waiting(small_source: Path, tmp_path: Path) -> None:
    waits = tmp_path / "compiler"
    waits.write_text('#!/bin/sh\ncase "$*" in *answer.cpp*) sleep 600;; esac\nexec g++ "$@"\n')
    waits.chmod(0o755)
    cache = tmp_path / "cache"
    code = (
        "import sys; from pathlib import Path; from tandem.kernels.cpu import build; "
        "build.SOURCES = Path(sys.argv[1]); build.built_library(sys.argv[2], Path(sys.argv[3]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, small_source, waits, cache], start_new_session=True) as killed:
        try:
            ends = time.monotonic() + 60
            while not any(cache.glob("building-*")):
                assert time.monotonic() < ends
                time.sleep(0.05)
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
    assert answer(build.built_library("g++", cache)) == 42


def test_no_compiler_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no compiler 'no-such-compiler'.*kernels reference") as caught:
        cpu.load("no-such-compiler", tmp_path)
    assert "\n" not in str(caught.value)


def test_no_compiler_is_said_once_and_leaves_the_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert cpu.load_or_none("no-such-compiler", tmp_path) is None
        assert cpu.load_or_none("no-such-compiler", tmp_path) is None
    assert len([r for r in caplog.records if "no-such-compiler" in r.message]) == 1


def test_a_failing_compiler_is_one_clear_line(small_source: Path, tmp_path: Path) -> None:
    (small_source / "answer.cpp").write_text("this is no C++\n")
    with pytest.raises(UserError, match=r"g\+\+ failed \(.*error.*\)") as caught:
        build.built_library("g++", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def compiler_that_is_killed(path: Path, times: int, by_the_driver: bool) -> str:
    """Returns a compiler that is killed the first ``times`` times, or whose driver says that the program it had started was."""
    count = path.with_suffix(".count")
    end = "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1" if by_the_driver else "kill -9 $$"
    path.write_text(f'#!/bin/sh\necho x >> {count}\nif [ $(wc -l < {count}) -le {times} ]; then {end}; fi\nexec g++ "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("by_the_driver", [False, True])
def test_a_compiler_that_is_killed_once_is_run_again(by_the_driver: bool, small_source: Path, tmp_path: Path) -> None:
    compiler = compiler_that_is_killed(tmp_path / "compiler", 1, by_the_driver)
    assert answer(build.built_library(compiler, tmp_path / "cache")) == 42


def test_a_compiler_that_is_killed_again_ends_the_process_instead_of_changing_its_kernels(small_source: Path, tmp_path: Path) -> None:
    compiler = compiler_that_is_killed(tmp_path / "compiler", 9, False)
    with pytest.raises(RunError, match="was killed twice") as caught:
        cpu.load_or_none(compiler, tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_one_clear_line(small_source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(UserError, match="cannot write to"):
        build.built_library("g++", tmp_path / "cache")


def test_a_directory_that_cannot_be_made_is_one_clear_line(small_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        build.built_library("g++", tmp_path / "file" / "cache")


def test_a_run_is_told_why_it_computes_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert why_reference("auto", select("auto"), torch.float32, here) == ""
    assert why_reference("auto", select("auto", torch.float64), torch.float64, here) == ""
    assert why_reference("reference", select("reference"), torch.float32, here) == ""
    assert "float32 with precision bf16 is faster" in why_reference("auto", select("auto", torch.bfloat16), torch.bfloat16, here)
    monkeypatch.setattr(build.shutil, "which", lambda program: None)
    for cached in (cpu._load, cpu._load_or_none):
        monkeypatch.setattr(cpu, cached.__wrapped__.__name__, cached.__wrapped__)
    why = why_reference("auto", select("auto"), torch.float32, here)
    assert "install g++" in why and "which are slower" in why and "\n" not in why


def test_auto_takes_the_reference_for_other_dtypes() -> None:
    assert select("auto", torch.float64).name == "reference"
    assert select("auto").name == "cpu"


def test_torch_and_the_kernels_share_one_thread_pool() -> None:
    select("cpu")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    # sentencepiece, which another test of this process may have imported, brings one of its own.
    pools = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line and "sentencepiece" not in line}
    assert len(pools) == 1


def test_what_is_called_often_is_a_builtin_and_refuses_wrong_arguments() -> None:
    library = Library(build.built_library("g++", build.default_directory()))
    out, weight, x = torch.empty(1, 3), torch.randn(3, 5), torch.randn(1, 5)
    arguments = (x.data_ptr(), weight.data_ptr(), 0, 0, 1, 3, 5, out.data_ptr())
    assert type(library.linear) is type(len)
    assert library.linear(*arguments) == 0
    assert torch.allclose(out, x @ weight.t(), atol=1e-6)
    for wrong in (arguments[1:], (*arguments, 0), ("x", *arguments[1:]), (1.5, *arguments[1:])):
        with pytest.raises(TypeError):
            library.linear(*wrong)


@pytest.mark.full
@pytest.mark.parametrize("target", ["-march=haswell", "-march=x86-64-v2 -mtune=generic"])
def test_every_instruction_set_gives_the_same_bits(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = select("cpu")
    flags = [f for f in build.FLAGS if f != "-march=native"] + target.split()
    monkeypatch.setattr(build, "FLAGS", tuple(flags))
    other = CpuKernels(Library(build.built_library("g++", tmp_path)))
    x, weight, bias = torch.randn(75, 300), torch.randn(99, 300), torch.randn(99)
    bounds = torch.tensor([0, 60, 75], dtype=torch.int32)
    q, kv, targets = torch.randn(75, 4, 24), torch.randn(75, 2, 24), torch.arange(75)
    settings = (torch.full((75,), 0.7), targets % 3 * 9, 1 - targets % 2 * 0.2, targets % 2 * 0.01)

    def results(kernels: CpuKernels) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias, q, kv)]
        logits = kernels.linear(*leaves[:3])
        wide = kernels.linear_packed(x[:1], kernels.pack(weight.repeat(4, 1)), None)
        mixed = kernels.packed_attention(leaves[3], leaves[4], leaves[4] * 2, bounds, 60, 0.2, 33)
        normed = kernels.rms_norm(kernels.silu_mul(leaves[0]), bias.repeat(2)[:150], 1e-6)
        logprobs = kernels.token_logprobs(leaves[0], leaves[1], targets, 0.8)
        capped = kernels.packed_attention(leaves[3], leaves[4], leaves[4] * 2, bounds, 60, 0.2, 33, cap=0.4)
        drained = kernels.packed_attention(leaves[3], leaves[4], leaves[4] * 2, bounds, 60, 0.2, 33, sinks=leaves[2][:4])
        swiglu = kernels.clamped_swiglu_mul(leaves[0] * 5)
        few = kernels.token_logprobs(kernels.gelu_mul(leaves[0]), leaves[1][:, :150], targets, 0.8, 3.0)
        total = logits.square().sum() + mixed.square().sum() + normed.sum() + (logprobs.raw * logprobs.scaled).sum()
        total = total + capped.square().sum() + drained.square().sum() + swiglu.sum() + (few.raw * few.scaled).sum()
        drawn = kernels.sample_rows(logits.detach(), *settings, torch.linspace(0, 0.99, 75).double())
        added = [capped, drained, swiglu]
        return [logits, wide, mixed, normed, *logprobs[:3], *added, *few[:3], kernels.soft_cap(x, 2.0), *drawn, *torch.autograd.grad(total, leaves)]

    for ours, theirs in zip(results(here), results(other), strict=True):
        assert torch.equal(ours, theirs)
