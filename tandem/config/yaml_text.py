"""Parses YAML that a user wrote: repeated keys, repeated text beyond what a recipe can hold, deep nesting and impossible numbers are refused."""

from collections.abc import Hashable
from typing import Any

import yaml

from tandem.types.errors import UserError
from tandem.types.input_file import read_input

MOST_VALUES = 100_000
"""Values of a recipe after its anchors are repeated: sections are copied and checked one by one, about a second for as many."""


MOST_LEVELS = 100
"""Brackets inside one another: the scanner takes the square of their number."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader for which a repeated key is an error, not a silent overwrite."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Raises ``RecursionError``."""
        super().fetch_flow_collection_start(TokenClass)
        if self.flow_level > MOST_LEVELS:
            raise RecursionError


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        where = f"{key_node.start_mark.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key, Hashable):
            raise UserError(f"{where}: a key is a list or a mapping; a key must be a name")
        if key in seen:
            raise UserError(f"{where}: key '{key}' is given twice; keep one")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def parse_yaml(text: str, name: str) -> Any:
    """Returns the value of the YAML document ``text``. ``name``: of its file, for messages. Raises ``UserError`` with the line, and
    ``yaml.YAMLError`` for text that is not YAML."""
    loader = _UniqueKeyLoader(text)
    loader.name = name
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, name)
        return loader.construct_document(node)
    except RecursionError:
        raise UserError(f"{name}: values are nested too deeply; a recipe has a few levels") from None
    except (ValueError, OverflowError) as error:
        # Python refuses to read numbers of thousands of digits, and dates that do not exist.
        raise UserError(f"{name}: a number or date cannot be read: {error}") from None
    finally:
        loader.dispose()


def _check_size(root: yaml.Node, name: str) -> None:
    """Raises ``UserError`` if the document is too large once its anchors are repeated, or contains itself. An anchor of ten references to an anchor
    of ten references, nine times, is a billion values in ten lines."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size_of(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in inside:
            raise UserError(f"{name}:{node.start_mark.line + 1}: an anchor contains itself; write its values out")
        if id(node) not in sizes:
            inside.add(id(node))
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            sizes[id(node)] = 1 + sum(map(size_of, parts))
            inside.remove(id(node))
        return sizes[id(node)]

    if (size := size_of(root)) > MOST_VALUES:
        raise UserError(f"{name}: the recipe has {size:.3g} values, more than {MOST_VALUES:,} (its anchors are repeated); shorten it")


def read_mapping(path: str, named: str, most_bytes: int, *, why_short: str, missing: str, wrong: str) -> dict[Any, Any]:
    """Returns the mapping in the YAML file ``path``, of at most ``most_bytes``. Raises ``UserError`` that begins with ``named``: what to do if it is
    ``missing``, and what is wrong with a file that holds no mapping; ``why_short`` is said of one that is too long."""
    try:
        content = parse_yaml(read_input(path, most_bytes, why_short).decode("utf-8"), path)
    except FileNotFoundError:
        raise UserError(f"{named} does not exist; {missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{named} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{named} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{named} {wrong}")
    return content
