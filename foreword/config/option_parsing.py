"""Options as text, in flags, environment variables and YAML files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from foreword.config.foreign_flags import find_foreign
from foreword.config.options import option_fields
from foreword.errors import ConfigError, did_you_mean

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
NULLS = ("null", "~")
MAX_NESTING = 50  # lists and mappings of a file within each other
SERVICE_SCHEMES = ("tcp://", "udp://")  # begin variables that Kubernetes sets for a service
PARSERS: Mapping[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
KIND_NAMES = {"str": "a text", "int": "a whole number", "float": "a number"}
FIELDS = {item.name: item for item in option_fields()}


def type_name(item: Any) -> str:
    """Type of a field without None: "str", "int", "float" or "bool"."""
    return str(item.type).split("|")[0].strip()


def parse_option(source: str, type_name: str, text: str) -> Any:
    """The value of a text; `source` begins the ConfigError."""
    if type_name == "bool":
        if text.lower() not in TRUE + FALSE:
            raise ConfigError(f"{source} must be one of {', '.join(TRUE + FALSE)}, got {text!r}", source)
        return text.lower() in TRUE
    try:
        return PARSERS[type_name](text)
    except ValueError:
        hint = ""
        if text.startswith(SERVICE_SCHEMES):
            hint = "; Kubernetes sets it for a service of this name: set enableServiceLinks: false in the pod"
        raise ConfigError(f"{source} must be {KIND_NAMES[type_name]}, got {text!r}{hint}", source) from None


class BoundedLoader(yaml.BaseLoader):
    """Refuses deep nesting, which costs seconds until Python's own limit of recursion ends it."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise yaml.MarkedYAMLError(problem=f"it nests more than {MAX_NESTING} lists and mappings")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose_yaml(kind: str, path: Path) -> yaml.Node | None:
    """The root of a YAML file, whose scalars are texts: YAML's own `off` would be a boolean.

    kind  "config file"; begins the ConfigError
    """
    param = kind.partition(" ")[0]
    try:
        root: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
    except OSError as error:
        raise ConfigError(f"{kind} {path}: {error.strerror or error}", param) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{kind} {path} is not YAML: {' '.join(str(error).split())}", param) from None
    return None if root is None or root.value == "" else root


def items_of(file: str, node: yaml.Node, content: str) -> Iterator[tuple[str, str, yaml.Node]]:
    """(place, key, value) of a mapping, such as ("FILE, line 3", "port", ...).

    content  what must be there: "`option: value` lines"
    Raises ConfigError for another content, or a key that is given twice.
    """
    if not isinstance(node, yaml.MappingNode):
        where = f"{file}, line {node.start_mark.line + 1}"
        raise ConfigError(f"{where}: must hold {content}, got {_describe(node)}", "config")
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        where = f"{file}, line {line}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{where}: unknown option 'a key of several values'", "config")
        name = str(key.value)
        if name in seen:
            raise ConfigError(f"{where}: {name} is given twice, first in line {seen[name]}", name)
        seen[name] = line
        yield where, name, value


def read_option_key(where: str, key: str, more: Iterable[str] = ()) -> str:
    """The field of Config that a key of a file names, with dashes or underscores.

    more  what else may stand there, for the ConfigError
    """
    name = key.replace("-", "_")
    if name in FIELDS:
        return name
    if (found := find_foreign(f"--{key.replace('_', '-')}")) is not None:
        raise ConfigError(f"{where}: {found[0].answer(key)} (an option of {found[0].source})", "config")
    known = [*(field.replace("_", "-") for field in FIELDS), *more]
    raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(key, known)}", "config")


def read_option_value(where: str, name: str, node: yaml.Node) -> Any:
    """The value of a field of Config; None for null. Raises ConfigError, which begins with `where`."""
    if name == "speculative_config" and isinstance(node, yaml.MappingNode):
        return json.dumps(_to_python(node))
    item = FIELDS[name]
    if isinstance(node, yaml.ScalarNode):
        text = str(node.value)
    elif item.metadata["many"] and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        text = ",".join(each.value for each in node.value)
    else:
        raise ConfigError(f"{where} must be a single value", name)
    if text in NULLS or (not text and not item.metadata["guards_access"]):
        return None
    return parse_option(where, type_name(item), text)


def _to_python(node: yaml.Node) -> Any:
    """With YAML's own types."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _to_python(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_to_python(each) for each in node.value]
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return yaml.safe_load(node.value) if is_plain else node.value


def _describe(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(str(node.value)[:80])
