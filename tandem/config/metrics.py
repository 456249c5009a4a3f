"""Section ``metrics``: whether a run answers ``/metrics``, and where."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The newest row, the phases and the faults of the run for Prometheus, over HTTP. Without the section there is none; `metrics: {}` has the defaults. See
    `observability.md`."""

    host: str = "127.0.0.1"
    """Address of this machine at which the run's controller answers `/metrics`. Anybody who reaches it reads the metrics."""
    port: int = 0
    """Its port. 0: a free one, which the targets folder names."""
    targets_folder: str = "~/.cache/tandem/targets"
    """Folder in which the run is named to Prometheus (`file_sd_configs`). Empty: none."""

    def check(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UserError(f"'metrics.port' is {self.port}; it must be between 0 (a free one) and 65535")
        if not self.host.strip() or not self.host.isprintable():
            raise UserError(f"'metrics.host' is {self.host!r}; give an address of this machine, for example 127.0.0.1")
