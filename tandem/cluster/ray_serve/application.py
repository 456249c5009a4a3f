"""Tandem's servers as an application of Ray Serve: ``import_path: tandem.cluster.ray_serve.application:application`` in a file of ``serve run`` or
``serve deploy``. Its ``args`` are a section ``servers`` of the gateway's file."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from tandem.cluster.ray_serve.replica import Replica
from tandem.cluster.ray_serve.section import read_section

_DRAIN_S = 3600.0
"""Time for a replica that leaves to finish what it has; an answer may be long."""
_LOOK_S = 1.0
_POLICY = "tandem.cluster.ray_serve.policy:QueuePolicy"


def application(args: Mapping[str, Any]) -> serve.Application:
    """Returns the application of one model, whose replicas are ``tandem serve``. ``args``: those keys of ``ServersConfig`` that do not say where on a machine a
    server runs, which Ray decides. Raises ``UserError``."""
    config = read_section(args)
    options: dict[str, Any] = {
        "name": "Servers", "max_ongoing_requests": config.max_requests, "graceful_shutdown_timeout_s": _DRAIN_S, "health_check_period_s": _LOOK_S,
        "health_check_timeout_s": 30.0, "ray_actor_options": {"num_cpus": 1, "num_gpus": config.gpus_each},
    }  # fmt: skip
    if config.scale.max_count:
        settings = {"scale": asdict(config.scale), "max_requests": config.max_requests}
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=config.scale.min_count, initial_replicas=config.count, max_replicas=config.scale.max_count,
            # The policy has delays of its own, which are those of the gateway.
            upscale_delay_s=0, downscale_delay_s=0, metrics_interval_s=_LOOK_S, look_back_period_s=_LOOK_S,
            policy=AutoscalingPolicy(policy_function=_POLICY, policy_kwargs=settings),
        )  # fmt: skip
    else:
        options["num_replicas"] = config.count
    deployment: Any = serve.deployment(Replica)
    bound: serve.Application = deployment.options(**options).bind(asdict(config))
    return bound
