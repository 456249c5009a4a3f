"""Loaded at the start of every Python process with this folder on its path. Hides all packages except those that engine and trainer need
(the standard library, torch, safetensors, tokenizers and PyYAML) and the dependencies of torch, which Tandem itself may not import."""

import builtins
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

OURS = {"tandem", "torch", "safetensors", "tokenizers", "yaml", *sys.stdlib_module_names}
OF_TORCH = {"typing_extensions", "sympy", "mpmath", "networkx", "fsspec", "filelock", "jinja2", "markupsafe", "functorch", "torchgen"}
_import = builtins.__import__


class Visible(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        visible = top in OURS | OF_TORCH or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if visible else None


def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__") or ""
    if level == 0 and importer.partition(".")[0] in ("tandem", "__main__") and name.partition(".")[0] not in OURS:
        raise ModuleNotFoundError(f"No module named '{name}' (hidden from {importer})", name=name)
    return _import(name, globals, locals, fromlist, level)


sys.meta_path[sys.meta_path.index(PathFinder)] = Visible()
builtins.__import__ = guarded
