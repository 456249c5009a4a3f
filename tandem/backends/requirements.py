"""What the environment of each sidecar has. Each function fills an empty one."""

import shutil

from tandem.backends.new_environment import NewEnvironment, tandem_requirements, torch_requirement
from tandem.types.errors import UserError


def install_vllm(environment: NewEnvironment) -> None:
    """vLLM with the versions that it asks for."""
    environment.install("vllm", *tandem_requirements())


def install_megatron(environment: NewEnvironment) -> None:
    """Megatron-Core beside our torch, without Transformer Engine: the layers of its local specification. Of the versions from 0.17 on, which need Python
    3.12, none was driven yet."""
    environment.install(torch_requirement(), *tandem_requirements())
    environment.install("megatron-core>=0.16,<0.17", constraints=[torch_requirement()])


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
