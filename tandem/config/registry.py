"""Section ``registry``: where committed checkpoints are entered as versions of a model."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """``path``: the folder of a registry of our own, made where it is not there (empty: none). ``uri``: MLflow's tracking address
    instead (``http://host:5000``, ``sqlite:///mlflow.db``). ``name``: what the model is called there; the run's name where empty."""

    path: str = ""
    uri: str = ""
    name: str = ""

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.uri)

    def check(self) -> None:
        """Raise ``UserError`` for two registries, and for a name that could not be written NAME/VERSION."""
        if self.path and self.uri:
            raise UserError("'registry.path' and 'registry.uri' are both set; a model is entered in one registry, so leave one of them empty")
        if set("/@") & set(self.name):
            raise UserError(f"'registry.name' is '{self.name}'; '/' and '@' stand before a version and a stage, choose a name without them")
