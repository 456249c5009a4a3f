"""The recipes and examples that come with Tandem. In a clone they are the folders ``recipes`` and ``examples``, to which those here are links."""

import difflib
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = ("recipes", "examples")


def bundled_recipes() -> dict[str, Path]:
    """Returns the files of the recipes by name: ``sort`` and so on."""
    return {path.stem: path for path in sorted((PACKAGE / "recipes").glob("*.yaml"))}


def recipe_file(given: str | Path) -> Path:
    """Returns the file ``given``, or that of the recipe of this name where there is no such file."""
    path = Path(given)
    return path if path.is_file() else bundled_recipes().get(str(given), path)


def how_to_name(given: str | Path) -> str:
    """Returns the end of an error message for a recipe ``given`` that does not exist."""
    known = bundled_recipes()
    near = difflib.get_close_matches(Path(given).stem, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}', which comes with Tandem?"
    return f"name a YAML file, or one that comes with Tandem: {', '.join(known)}"


def about(path: Path) -> str:
    """Returns the first sentence of the comment that the recipe at ``path`` begins with."""
    comment = re.match(r"(?:#[^\n]*\n)*", path.read_text(encoding="utf-8"))
    assert comment is not None
    text = " ".join(line.lstrip("# ") for line in comment[0].splitlines())
    return re.split(r"[.:] | \(", text, maxsplit=1)[0]
