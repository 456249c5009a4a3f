"""Section ``registry``: where committed checkpoints are registered as versions of a model."""

from dataclasses import dataclass

from tandem.config.addresses import check_no_secret
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The model registry in which committed checkpoints are registered."""

    path: str = ""
    """Folder of a Tandem registry, created if it does not exist. Empty: none."""
    uri: str = ""
    """MLflow tracking address instead (`http://host:5000`, `sqlite:///mlflow.db`). Empty: none."""
    name: str = ""
    """Name of the registered model. Empty: the run's name."""

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.uri)

    def check(self) -> None:
        """Raises ``UserError`` for two registries, and for a name that does not work in NAME/VERSION or NAME@STAGE."""
        if self.path and self.uri:
            raise UserError("'registry.path' and 'registry.uri' are both set; a model is registered in one registry, so leave one of them empty")
        check_no_secret("'registry.uri'", self.uri)
        if set("/@") & set(self.name):
            raise UserError(f"'registry.name' is '{self.name}'; '/' and '@' separate the version and the stage; choose a name without them")
        if not self.is_on:
            refuse_unread("registry", self, "there is no registry", "name", fix="set registry.path or registry.uri")
