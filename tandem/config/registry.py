"""Section ``registry``: where committed checkpoints are entered as versions of a model."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The model registry that committed checkpoints are entered in."""

    path: str = ""
    """The folder of a registry of our own, made where it does not exist. Empty: none."""
    uri: str = ""
    """MLflow's tracking address instead (`http://host:5000`, `sqlite:///mlflow.db`). Empty: none."""
    name: str = ""
    """The model's name there. Empty: the run's."""

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.uri)

    def check(self) -> None:
        """Raise ``UserError`` for two registries, and for a name that could not be written NAME/VERSION."""
        if self.path and self.uri:
            raise UserError("'registry.path' and 'registry.uri' are both set; a model is entered in one registry, so leave one of them empty")
        if set("/@") & set(self.name):
            raise UserError(f"'registry.name' is '{self.name}'; '/' and '@' stand before a version and a stage, choose a name without them")
