"""Functions of the user, by import path."""

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.types import UserError
from tandem.types.one_line import describe, shortened

PICKLED = ".pkl"
"""The end of the name of a file with a function by value, as ``train`` writes it."""
_folders: set[str] = set()
"""The folders of loaded files, which are on the path of this process."""


def load_function(path: str, what: str) -> tuple[Callable[..., Any], str]:
    """Returns the function at ``module:function``, ``path/to/file.py:function`` or, by value, ``path/to/file.pkl:function``, and the file that has it (empty:
    not known). ``what``: what it is, for messages. Raises ``UserError``."""
    where, _, name = path.rpartition(":")
    if where.endswith(PICKLED):
        return _unpickled(Path(where), what), where
    try:
        module = _load_file(Path(where), what) if where.endswith(".py") or "/" in where else importlib.import_module(where)
    except UserError:
        raise
    except BaseException as error:  # a module may raise anything, SystemExit too, when it is imported
        raise UserError(f"{what} '{path}' cannot be loaded: {describe(error)}") from error
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        has = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise UserError(f"{what} '{path}': '{where}' has no '{name}'; {has}")
    if not callable(function):
        raise UserError(f"{what} '{path}': '{name}' is {shortened(function)}, which cannot be called")
    file = getattr(module, "__file__", None) or ""
    return function, str(file if Path(file).is_file() else "")


def path_for_children() -> str:
    """Returns the ``PYTHONPATH`` with which a child finds what this process finds. The folders of loaded files are not in it: a child that loads the same file
    adds its folder itself, and before the standard library, where ``PYTHONPATH`` is, a ``json.py`` there would keep the child from starting."""
    return os.pathsep.join(path for path in sys.path if path and path not in _folders)


def _unpickled(file: Path, what: str) -> Callable[..., Any]:
    try:
        import cloudpickle  # noqa: F401  # Its functions are rebuilt by it.

        function = pickle.loads(file.read_bytes())
    except ImportError as error:
        fix = "pip install 'tandem-rl[notebook]'" if error.name == "cloudpickle" else "install it"
        raise UserError(f"{what} file '{file}' needs the package '{error.name}', which is not installed; {fix}") from None
    except OSError as error:
        raise UserError(f"{what} file '{file}' cannot be read: {error.strerror}; restore the run's folder from a copy") from None
    except BaseException as error:  # What is rebuilt may raise anything.
        raise UserError(f"{what} file '{file}' cannot be loaded: {describe(error)}; it needs the Python and the packages it was made with") from None
    return function  # type: ignore[no-any-return]


def _load_file(file: Path, what: str) -> Any:
    if not file.is_file():
        raise UserError(f"{what} file '{file}' does not exist; paths are relative to where the command is run")
    name = f"tandem_{what.replace(' ', '_')}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{what} file '{file}' is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)  # so that it can import modules in its own folder
    _folders.add(folder)
    spec.loader.exec_module(module)
    return module
