#!/bin/bash
# Installs Tandem with extras, and every package with the version and the hash of requirements.lock: install.sh EXTRAS [PACKAGE...]
# Torch is installed before. Setuptools, with which Tandem itself is built, is one of the lock too.
set -euo pipefail
extras=$1
shift
report=$(mktemp) wanted=$(mktemp)
trap 'rm -f "$report" "$wanted"' EXIT
python -m pip install --dry-run --quiet --report "$report" --constraint constraints.txt ".[$extras]" setuptools "$@"
python docker/locked_subset.py requirements.lock < "$report" > "$wanted"
if [ -s "$wanted" ]; then
    python -m pip install --require-hashes --no-deps --requirement "$wanted"
fi
python -m pip install --no-deps --no-build-isolation .
python -m pip check
