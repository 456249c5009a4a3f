"""List the recipes that come with Tandem, print one, or copy them.

A recipe is trained by its name; to change more than a few keys, save it as a file of your own.

examples:
  tandem recipes                       list them
  tandem train sort                    train one
  tandem recipes sort > mine.yaml      save one to edit
  tandem recipes --copy .              copy recipes/ and examples/, whose paths the documents use, to this folder
"""

import argparse
import shutil
from pathlib import Path

from tandem.config.bundled import FOLDERS, PACKAGE, about, bundled_recipes, how_to_name
from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the recipe to print")
    parser.add_argument("--copy", metavar="FOLDER", help="copy recipes/ and examples/ into this folder")


def run(options: argparse.Namespace) -> int:
    known = bundled_recipes()
    if options.copy is not None:
        if options.name is not None:
            raise UserError("--copy copies all recipes; leave out the name, or print one with 'tandem recipes NAME'")
        return _copy(Path(options.copy))
    if options.name is None:
        for name, path in known.items():
            print(f"{name:<{max(map(len, known))}}  {about(path)}")
        return 0
    if options.name not in known:
        raise UserError(f"no recipe '{options.name}' comes with Tandem; {how_to_name(options.name)}")
    print(known[options.name].read_text(encoding="utf-8"), end="")
    return 0


def _copy(folder: Path) -> int:
    for name in FOLDERS:
        if (folder / name).exists():
            raise UserError(f"'{folder / name}' exists and nothing is overwritten; name another folder for --copy")
    for name in FOLDERS:
        shutil.copytree(PACKAGE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        print(folder / name)
    return 0
