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
    database: bool = True
    """Keep the series in `metrics.sqlite` of the run's folder too, where the dashboard reads them without a Prometheus."""
    interval_s: float = 15.0
    """Seconds between two of its samples."""
    retention_days: float = 15.0
    """How long it keeps samples: all of them for a day, then one each minute."""
    database_mib: float = 256.0
    """Its size; beyond it the oldest samples are removed."""

    def check(self) -> None:
        if not 0 <= self.port < 2**16:
            raise UserError(f"'metrics.port' is {self.port}; it must be between 0 (a free one) and 65535")
        if not 1 <= self.interval_s <= 3600:
            raise UserError(f"'metrics.interval_s' is {self.interval_s:g}; it must be between 1 and 3600 seconds")
        if not 0.01 <= self.retention_days <= 3650:
            raise UserError(f"'metrics.retention_days' is {self.retention_days:g}; it must be between 0.01 and 3650")
        if not 1 <= self.database_mib <= 1e6:
            raise UserError(f"'metrics.database_mib' is {self.database_mib:g}; it must be between 1 and 1000000")
        if not self.host.strip() or not self.host.isprintable():
            raise UserError(f"'metrics.host' is {self.host!r}; give an address of this machine, for example 127.0.0.1")
