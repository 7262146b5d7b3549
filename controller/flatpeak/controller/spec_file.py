"""The job spec as a file: reading YAML with overrides, writing the resolved spec, the starter."""

import re
import sys
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from flatpeak.controller.spec import Section, Spec, parse_spec
from flatpeak.controller.spec_problems import section_at
from flatpeak.controller.spec_values import MOST_DEPTH, shortened, shown
from flatpeak.workers.errors import SpecError

STARTER_VALUES: dict[str, Any] = {
    "run": "my-run",
    "model.config": {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 1024,
    },
    "train.steps": 20,
    "train.dtype": "float32",
    "cluster.workers": 2,
}
"""What the starter sets apart from the defaults: a model that trains on two cores."""


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> Spec:
    """The spec in the YAML file `path`, with overrides such as `train.steps=20` applied in order.

    Raises SpecError for a file that cannot be read or is not YAML, an override without `=`, and
    whatever `parse_spec` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecError(
            f"cannot read the job spec {path}: {reason}; `flatpeak init` writes one"
        ) from None
    data, overrides = _read_yaml(text, source=str(path)), list(overrides)
    for override in overrides:
        data = _overridden(data, override)
    return parse_spec(data, source=str(path), overrides=overrides)


def dump_spec(spec: Spec) -> str:
    """YAML that `load_spec` reads back to an equal spec."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def starter_yaml() -> str:
    """A complete job file with every setting, its default and its documentation."""
    header = [
        "# A Flatpeak job. Start it with `flatpeak train`.",
        "# Each line above a setting says what rises or falls with it.",
    ]
    return "\n".join([*header, *_starter_lines(Spec, path="", depth=0)]) + "\n"


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Each level takes some frames of Python's stack, here and wherever the tree is read.
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested deeper than {MOST_DEPTH} levels",
                problem_mark=self.peek_event().start_mark,
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # YAML lets a repeated key win silently; in a job spec it is a mistake.
        names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.constructor.ConstructorError(
                problem=f"the key `{twice[0]}` is given twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        try:
            return super().construct_yaml_int(node)
        except ValueError:
            digits = re.sub(r"\D", "", node.value)
            if len(digits) <= sys.int_info.default_max_str_digits:
                raise
            # Too long for Python to read, and for any setting, which is what will be said of it.
            size = 10 ** (len(digits) - 1)
            return -size if node.value.startswith("-") else size


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


# YAML 1.1 reads `1e-4` as a string, because it has no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _read_yaml(text: str, *, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader
    except (
        yaml.YAMLError,
        *(ValueError, OverflowError),  # 0x_, or a 13th month
        *(LookupError, AttributeError, TypeError),  # a tag that does not suit its value
    ) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{shortened(source)} is not valid YAML{where}: {what}") from None


def _overridden(data: Any, override: str) -> Any:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(f"--set {override!r} is no assignment; write it like --set train.steps=20")
    if len(keys) > MOST_DEPTH:
        raise SpecError(f"--set {shown(override)} goes deeper than {MOST_DEPTH} levels")
    value = _read_yaml(text, source=f"--set {override!r}")
    return _with_value(data, keys, value, override)


def _with_value(data: Any, keys: list[str], value: Any, override: str) -> Any:
    if not keys:
        return value
    if data is not None and not isinstance(data, dict):
        raise SpecError(
            f"--set {override!r} goes below {shown(data)}, which is a value, not a section"
        )
    data = data or {}
    first, *rest = keys
    return data | {first: _with_value(data.get(first), rest, value, override)}


def _starter_lines(section: type[Section], *, path: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in section.model_fields.items():
        dotted = f"{path}{name}"
        inner = section_at(Spec, dotted.split("."))
        if inner is not None and depth == 0:
            yield ""
        yield f"{indent}# {field.description}"
        if inner is not None:
            assert issubclass(inner, Section)
            yield f"{indent}{name}:"
            yield from _starter_lines(inner, path=f"{dotted}.", depth=depth + 1)
            continue
        value = STARTER_VALUES.get(dotted, field.default)
        yield from (indent + line for line in _setting(name, value))


def _setting(name: str, value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [f"{name}: [{', '.join(map(str, value))}]"]
    return yaml.safe_dump({name: value}, sort_keys=False).splitlines()
