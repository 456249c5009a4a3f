"""What ``/collective_rpc`` can ask of every worker of vLLM besides vLLM's own calls (``--worker-extension-cls``). Runs inside vLLM."""

from typing import Any

from tandem.backends.vllm.raw_logprobs import report_raw_logprobs


class WorkerExtension:
    """Mixed into vLLM's worker. Names begin with ``tandem_``, since they must not be any of vLLM's."""

    weight_transfer_engine: Any
    model_runner: Any

    def tandem_report_raw_logprobs(self) -> None:
        """Lets the sampler report raw log-probabilities too."""
        report_raw_logprobs(self.model_runner.sampler)

    def tandem_return_routed_experts(self) -> None:
        """Lets the first model runner return the experts that tokens are sent to; the second does by itself."""
        if not self.model_runner.vllm_config.use_v2_model_runner:
            from tandem.backends.vllm.routed_experts import return_routed_experts

            return_routed_experts(self.model_runner)

    def tandem_update_outcome(self) -> dict[str, Any]:
        """Returns ``PublishedWeights.outcome``."""
        outcome: dict[str, Any] = self.weight_transfer_engine.outcome
        return outcome

    def tandem_drop_update(self) -> None:
        """Gives up an update that another rank could not read."""
        self.weight_transfer_engine.drop()

    def tandem_digests_after_update(self) -> dict[str, str]:
        """Returns the digests of what this worker held after the last update, by name."""
        digests: dict[str, str] = self.weight_transfer_engine.digests
        return digests

    def tandem_held_digests(self) -> dict[str, str]:
        """Returns the digests of what this worker holds now, by name."""
        digests: dict[str, str] = self.weight_transfer_engine.held_digests()
        return digests
