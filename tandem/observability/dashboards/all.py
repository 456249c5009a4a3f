"""All dashboards."""

from tandem.observability.dashboards.cluster import CLUSTER
from tandem.observability.dashboards.rl import RL
from tandem.observability.dashboards.serving import SERVING
from tandem.observability.dashboards.training import TRAINING

DASHBOARDS = (SERVING, TRAINING, RL, CLUSTER)
