"""The functions of the user that a pod of another machine runs in its episodes: tools, and the agent. Their files are sent with the recipe. Imports no torch.

A function that the recipe names by its file goes with the modules and packages of that file's folder that it imports, and those that these import. A function
that the recipe names by its module must be installed on the machine of the pod.
"""

import ast
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tandem.config.recipe import Recipe
from tandem.runtime.import_path import PICKLED
from tandem.types import RunError, UserError
from tandem.types.wire import Buffer

MOST_BYTES = 64 * 2**20
"""Of all files together; they are source code, or functions by value."""


@dataclass(frozen=True, slots=True)
class SentFunctions:
    """``files``: the bytes of each, by its path below the folder that a pod has for them. ``paths``: what stands for each import path of the recipe there, with
    the file as such a path."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)


def sent_functions(recipe: Recipe) -> SentFunctions:
    """Returns the files of the functions that episodes of ``recipe`` run. Raises ``UserError`` for a file that cannot be read, and if they are too large."""
    files, paths, folders = dict[str, bytes](), dict[str, str](), list[Path]()
    for path in import_paths(recipe):
        where, _, name = path.rpartition(":")
        if not (where.endswith((".py", PICKLED)) or "/" in where):
            continue
        file = Path(where).resolve()
        if file.parent not in folders:
            folders.append(file.parent)
        number = folders.index(file.parent)
        try:
            for each in [file] if where.endswith(PICKLED) else _with_imported(file):
                files[f"{number}/{each.relative_to(file.parent).as_posix()}"] = each.read_bytes()
        except OSError as error:
            raise UserError(f"'{path}' is run by pods on other machines too, and '{error.filename}' cannot be read: {error.strerror}") from None
        paths[path] = f"{number}/{file.name}:{name}"
    size_bytes = sum(map(len, files.values()))
    if size_bytes > MOST_BYTES:
        raise UserError(
            f"the files of {', '.join(paths)} have {size_bytes:,} bytes, and at most {MOST_BYTES:,} are sent to pods on other machines; install them there as "
            "a package, and name the functions as module:function"
        )
    return SentFunctions(files, paths)


def import_paths(recipe: Recipe) -> list[str]:
    """Returns the import paths of the functions that episodes of ``recipe`` run."""
    agent = recipe.rollout.agent
    return [*([agent.function] if agent is not None else []), *recipe.task.tools]


def take_functions(config: dict[str, Any], folder: Path, paths: Mapping[str, str], files: Mapping[str, Buffer]) -> None:
    """Writes ``files`` to ``folder``, which is made anew, and names them in the recipe ``config``, where it has the import ``paths``. Raises ``RunError`` for a
    file that would not be in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name, content in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RunError(f"'{name}' is not the name of a file below '{folder}'")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    here = {path: str(folder.absolute() / sent) for path, sent in paths.items()}
    agent, task = config.get("rollout", {}).get("agent"), config.get("task", {})
    if agent:
        agent["function"] = here.get(agent["function"], agent["function"])
    if task.get("tools"):
        task["tools"] = [here.get(tool, tool) for tool in task["tools"]]


def _with_imported(file: Path) -> Iterator[Path]:
    """Yields ``file``, and what of its folder it imports, directly or through others."""
    folder, seen, left = file.parent, set[Path](), [file]
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each
        if each.suffix == ".py":
            for name in _imported(each):
                package = folder / name
                left += [folder / f"{name}.py"] if (folder / f"{name}.py").is_file() else sorted(package.rglob("*.py")) if _is_package(package) else []


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _imported(file: Path) -> set[str]:
    """Returns the first parts of the names of the modules that ``file`` imports, also inside its functions. Empty if it is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}
