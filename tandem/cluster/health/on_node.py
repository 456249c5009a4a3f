"""What a launcher runs on each node before the run: ``python -m tandem.cluster.health.on_node RUN HOST [--KEY=VALUE ...]``, the node's part of the preflight.

HOST: the address of the run's first node. The node has the name that Slurm gives it, elsewhere that of its machine.
"""

import logging
import os
import socket
import sys
from pathlib import Path

from tandem.cluster.health.preflight import run_on_node
from tandem.cluster.launch.addresses import own_address
from tandem.config.recipe import load_config
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.process.temporary import choose_temporary_folder
from tandem.types import UserError


def main() -> int:
    directory, host, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    logging.basicConfig(level=logging.WARNING, format=f"[{node}] %(message)s")
    choose_temporary_folder()
    try:
        recipe = load_config(directory / "config.yaml", overrides)
        store = open_store(store_address(recipe.coordination, directory))
        run_on_node(store, node, own_address(host), recipe.machine, recipe.cluster.preflight_timeout_s)
    except UserError as error:
        print(f"node {node}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
