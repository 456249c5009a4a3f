"""What the environment of each sidecar has. Each function fills an empty one."""

from tandem.backends.new_environment import NewEnvironment, tandem_requirements, torch_requirement


def install_vllm(environment: NewEnvironment) -> None:
    """vLLM with the versions that it asks for."""
    environment.install("vllm", *tandem_requirements())


def install_megatron(environment: NewEnvironment) -> None:
    """Megatron-Core beside our torch, without Transformer Engine: the layers of its local specification. Of the versions from 0.17 on, which need Python
    3.12, none was driven yet."""
    environment.install(torch_requirement(), *tandem_requirements())
    environment.install("megatron-core>=0.16,<0.17", constraints=[torch_requirement()])


def install_deepspeed(environment: NewEnvironment) -> None:
    """DeepSpeed beside our torch."""
    environment.install(torch_requirement(), *tandem_requirements())
    environment.install("deepspeed", constraints=[torch_requirement()])
