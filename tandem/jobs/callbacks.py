"""The callbacks of a run: several as one, and what happens when one fails."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.jobs.run_files import resume_command
from tandem.runtime.callback import Callback
from tandem.types import RunError, UserError

EVENTS = tuple(name for name, value in vars(Callback).items() if callable(value) and not name.startswith("_") and name != "wants_stop")
_TRANSFORMERS = {
    "on_train_begin": "name it 'started'",
    "on_step_begin": "name it 'phase'",
    "on_substep_end": "name it 'progress'",
    "on_step_end": "name it 'row'",
    "on_log": "name it 'row'",
    "on_evaluate": "name it 'evaluated'",
    **dict.fromkeys(
        ("on_init_end", "on_epoch_begin", "on_epoch_end", "on_optimizer_step", "on_pre_optimizer_step", "on_predict", "on_prediction_step", "on_save"),
        f"the methods are {', '.join(EVENTS)}",
    ),
    "on_train_end": "do its work after 'train' has returned",
}
"""Methods of the callbacks of transformers and TRL, and what has their place."""


class Callbacks(Callback):
    """Passes every event on to each of ``callbacks``. One that raises is told nothing more, and the run is saved and stopped after its step."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for number, callback in enumerate(callbacks):
            _check(callback, f"callbacks[{number}]")
        self._callbacks = list(callbacks)
        self._failure: tuple[str, Exception] | None = None
        self._stopped_by = ""

    def add(self, callback: Callback) -> None:
        """Passes events on to ``callback`` first."""
        self._callbacks.insert(0, callback)

    def tell(self, event: str, *values: Any) -> None:
        """Calls the method ``event`` of each callback."""
        for callback in list(self._callbacks):
            try:
                getattr(callback, event)(*values)
            except Exception as error:
                self._fail(callback, event, error)

    def wants_stop(self) -> bool:
        for callback in list(self._callbacks):
            try:
                wants = callback.wants_stop()
            except Exception as error:
                self._fail(callback, "wants_stop", error)
            else:
                self._stopped_by = self._stopped_by or (type(callback).__name__ if wants else "")
        return self._failure is not None or bool(self._stopped_by)

    def _fail(self, callback: Callback, event: str, error: Exception) -> None:
        self._callbacks.remove(callback)
        self._failure = self._failure or (f"{type(callback).__name__}.{event} raised {type(error).__name__}: {' '.join(str(error).split())}", error)

    def raise_why(self, directory: Path, *, is_stopped: bool) -> None:
        """Raises ``RunError`` if a callback failed, or stopped the run in ``directory``. ``is_stopped``: the run is saved and did not finish."""
        resume = f"'{resume_command(directory)}' continues it"
        if self._failure is not None:
            what, error = self._failure
            rest = f"the run is saved, and {resume}" if is_stopped else f"the run has finished, see '{directory}'"
            raise RunError(f"{what}; {rest}") from error
        if is_stopped and self._stopped_by:
            raise RunError(f"{self._stopped_by}.wants_stop stopped the run, which is saved: {resume}")


def _teller(event: str) -> Any:
    def tell(self: Callbacks, *values: Any) -> None:
        self.tell(event, *values)

    return tell


for _event in EVENTS:
    setattr(Callbacks, _event, _teller(_event))


def _check(callback: object, where: str) -> None:
    """Raises ``UserError`` for what is no ``Callback``, and for one whose methods would never be called."""
    if not isinstance(callback, Callback):
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise UserError(f"{where} is the class {callback.__name__}; give an instance: {callback.__name__}()")
        given = f"the class {callback.__name__}" if isinstance(callback, type) else f"of {type(callback).__module__}.{type(callback).__name__}"
        raise UserError(f"{where} is {given}, which is not a tandem.Callback; derive it from tandem.Callback, whose methods are {', '.join(EVENTS)}")
    for name in _TRANSFORMERS.keys() & set(dir(type(callback))):
        raise UserError(
            f"{where}, {type(callback).__name__}, has a method '{name}', which is never called; {_TRANSFORMERS[name]}; see help(tandem.Callback)"
        )
