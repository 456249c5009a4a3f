"""Plays the load of a pool through the engine's own scheduler and KV cache manager, to check a plan. Imports no torch."""

from typing import Any

from tandem.estimate.serving.kv_cache import widest_window
from tandem.estimate.serving.step_time import EngineStep, predict_step
from tandem.planner.serving.arrivals import Arrival, draw_arrivals_of
from tandem.planner.serving.pool import PoolPlan
from tandem.planner.serving.simulator import SimulatedEngine, simulate

REQUESTS = 1000
SHARES = (0.5, 0.95, 0.99)


def simulate_pool(plan: PoolPlan) -> dict[str, Any]:
    """Returns the latency of one engine of the pool: of its share of the trace as it was recorded, or of ``REQUESTS`` requests with Poisson arrivals."""
    request, chosen = plan.request, plan.chosen
    demand, layout = request.demand, chosen.layout
    arrivals = _engine_trace(plan) if demand.trace else draw_arrivals_of(
        chosen.requests_per_s, demand.traffic.prompts, demand.traffic.outputs, REQUESTS, shared_tokens=int(demand.traffic.shared_tokens)
    )  # fmt: skip
    length = layout.max_model_len
    fitting = [each for each in arrivals if each.prompt_tokens + each.output_tokens <= length]
    engine = SimulatedEngine(
        chosen.memory.num_blocks, layout.max_num_seqs, layout.max_num_batched_tokens,
        window=widest_window(request.shapes) or 0,
        state_snapshots=None if request.shapes.linear_attention is None else chosen.memory.num_snapshots,
    )  # fmt: skip

    def seconds(step: EngineStep) -> float:
        return predict_step(request.shapes, layout, request.hardware, step).seconds

    run = simulate(fitting, engine, seconds)
    return {
        "requests": len(fitting), "refused_as_too_long": len(arrivals) - len(fitting), "output_tokens_per_s": run.output_tokens_per_s,
        "most_running": run.most_running, "preemptions": run.preemptions,
        "ttft_s": {f"p{100 * share:g}": run.quantile("time_to_first_token_s", share) for share in SHARES},
        "tpot_s": {f"p{100 * share:g}": run.quantile("time_per_output_token_s", share) for share in SHARES},
    }  # fmt: skip


def simulated_text(simulated: dict[str, Any]) -> str:
    """Returns a line on a simulation."""
    figures = ", ".join(
        f"{name.upper()} " + " ".join(f"{share} {1e3 * value:,.3g} ms" for share, value in simulated[f"{name}_s"].items()) for name in ("ttft", "tpot")
    )
    refused = simulated["refused_as_too_long"]
    return (
        f"simulated, one engine, {simulated['requests']:,} requests: {figures}; {simulated['output_tokens_per_s']:,.0f} tokens/s, at most "
        f"{simulated['most_running']} running, {simulated['preemptions']} preemptions" + (f", {refused} too long and refused" if refused else "")
    )


def _engine_trace(plan: PoolPlan) -> list[Arrival]:
    """Returns every n-th request of the trace, for n engines that take turns, in the time of the rate that the plan is for."""
    trace, instances = plan.request.demand.trace, plan.chosen.instances
    shared = int(plan.request.demand.traffic.shared_tokens)
    return [each._replace(shared_tokens=min(shared, each.prompt_tokens - 1)) for each in trace[::instances]]
