"""The registry that a recipe or a command names."""

from pathlib import Path

from tandem.config.registry import RegistryConfig
from tandem.model_registry.local import LocalRegistry
from tandem.model_registry.mlflow import MlflowRegistry


def open_registry(config: RegistryConfig, *, create: bool = False) -> LocalRegistry | MlflowRegistry:
    """Raises ``UserError`` where it is not there and is not to be made."""
    return MlflowRegistry(config.uri) if config.uri else LocalRegistry(Path(config.path), create=create)
