"""Tells the cluster manager of nodes that silent data corruption was found on. Imports no torch."""

import logging
import socket

from tandem.config.recipe import AnyRecipe
from tandem.runtime.coordination.cordons import cordon
from tandem.runtime.coordination.open import cluster_address, open_store, with_deadline
from tandem.trainer.corruption.finding import CorruptionFinding
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)
_STORE_S = 10.0


def cordon_corrupt(recipe: AnyRecipe, run: str, finding: CorruptionFinding) -> bool:
    """Cordons the nodes of ``finding`` in the cluster, for all runs and until the cordons are removed, and returns whether the run goes on with spares in
    their places.

    It does not where it is not known which node is wrong, where one of them has this controller, and without spares: then nothing is cordoned here."""
    may = recipe.coordination.store == "etcd" and recipe.cluster.spares > 0 and not finding.is_undecided
    if not may or socket.gethostname() in finding.hosts:
        return False
    try:
        store = open_store(with_deadline(cluster_address(recipe.coordination), _STORE_S))
    except (RunError, UserError) as error:
        logger.warning("the cluster's store did not open: %s", error)
        return False
    try:
        for node in sorted(set(finding.hosts)):
            cordon(store, node, finding.describe(), run)
    except (RunError, UserError) as error:
        logger.warning("%s could not be cordoned: %s", " and ".join(finding.hosts), error)
        return False
    finally:
        store.close()
    return True
