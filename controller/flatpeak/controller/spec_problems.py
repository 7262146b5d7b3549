"""What a refused spec is told: one line a problem, with dotted path, value and the nearest key."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from flatpeak.controller.spec_values import name_of, shown

_MOST_SHOWN = 20


def describe_problems(
    error: ValidationError,
    data: Any,
    root: type[BaseModel],
    *,
    source: str,
    overrides: Sequence[str] = (),
) -> str:
    """The problems by where they come from: `source`, or one of the `overrides` that data has."""
    found: dict[tuple[str, str], list[str]] = {}
    for detail in error.errors(include_url=False):
        subject, complaint = _problem(detail, data, root)
        origin = _origin(_path(detail["loc"], data), complaint, source, overrides)
        complaints = found.setdefault((origin, subject), [])
        if complaint not in complaints:
            complaints.append(complaint)
    lines: dict[str, list[str]] = {}
    for (origin, subject), complaints in found.items():
        # The branches of `int or "auto"` each complain of the same value: one line for both.
        lines.setdefault(origin, []).append(subject + _either(complaints))
    return "\n".join(f"{origin}: {_together(problems)}" for origin, problems in lines.items())


def _together(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    left = [f"and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
    return "\n  ".join([f"{len(problems)} problems", *problems[:_MOST_SHOWN], *left])


def _origin(path: list[str], complaint: str, source: str, overrides: Sequence[str]) -> str:
    """The last override at `path` or above it; else the source, with the overrides below `path`
    that the complaint speaks of: a rule about several settings."""
    below = []
    for override in reversed(overrides):
        keys = override.partition("=")[0].strip().split(".")
        if path[: len(keys)] == keys:
            return f"--set {shown(override)}"
        if keys[: len(path)] == path and re.search(rf"\b{re.escape(keys[-1])}\b", complaint):
            below.insert(0, f"--set {shown(override)}")
    return f"{source} with {', '.join(below)}" if below else source


def _either(complaints: list[str]) -> str:
    first, *others = complaints
    return " or ".join([first, *(other.removeprefix("should be ") for other in others)])


def section_at(root: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The section class at a dotted path below `root`, or None where there is none."""
    section: type[BaseModel] | None = root
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = _section_of(field.annotation) if field else None
    return section


def _problem(detail: Any, data: Any, root: type[BaseModel]) -> tuple[str, str]:
    kind, path = detail["type"], _path(detail["loc"], data)
    if kind == "missing":
        path.append(str(detail["loc"][-1]))
        return f"{'.'.join(path)}: ", "is required"
    if kind == "extra_forbidden":
        return _unknown_key(path, root)
    dotted = ".".join(path)
    if kind == "invalid_key" or detail["loc"][-1:] == ("[key]",):
        return f"{dotted}: ", "the key should be text, in quotes where it looks like a number"
    if kind == "value_error":  # a rule of ours, which words itself
        return (f"{dotted}: " if dotted else ""), str(detail["ctx"]["error"])
    if kind in ("model_type", "model_attributes_type"):
        return f"{dotted or 'the job'} = {shown(detail['input'])}: ", "should be a section of keys"
    if kind == "string_pattern_mismatch":
        complaint = "should start with a-z or 0-9 and go on with a-z, 0-9, '.', '_', '-'"
        return f"{dotted} = {shown(detail['input'])}: ", complaint
    return f"{dotted} = {shown(_value_at(data, path))}: ", _lower(detail["msg"])


def _lower(message: str) -> str:
    return message.removeprefix("Input ")[:1].lower() + message.removeprefix("Input ")[1:]


def _path(location: tuple[int | str, ...], data: Any) -> list[str]:
    # pydantic appends the name of the union's branch; the data says where the path ends.
    path: list[str] = []
    for part in location:
        keys = data if isinstance(data, dict) else range(len(data) if _is_list(data) else 0)
        if part not in keys:
            break
        data = data[part]
        path.append(name_of(part))
    return path


def _is_list(data: Any) -> bool:
    return isinstance(data, list | tuple)


def _value_at(data: Any, path: list[str]) -> Any:
    for part in path:
        data = data[part] if isinstance(data, dict) else data[int(part)]
    return data


def _unknown_key(path: list[str], root: type[BaseModel]) -> tuple[str, str]:
    *parents, key = path
    section = section_at(root, parents)
    assert section is not None, f"{path} has no section"
    where = f"section `{'.'.join(parents)}`" if parents else "the top level"
    here = {name: ".".join([*parents, name]) for name in section.model_fields}
    # Of keys of one name the one nearest to the top.
    leaves = sorted(_leaves(root), key=lambda path: -path.count("."))
    anywhere = {path.rsplit(".", 1)[-1]: path for path in leaves}
    # A likely key of the same section, else a very likely one elsewhere, else the best there is
    # with all that the section takes.
    for candidates, cutoff, rest in (
        (here, 0.6, ""),
        (anywhere, 0.75, ""),
        (here, 0.0, f" of {', '.join(section.model_fields)}"),
    ):
        if match := difflib.get_close_matches(key, candidates, n=1, cutoff=cutoff):
            nearest = f"the nearest is `{candidates[match[0]]}`{rest}"
            return f"{where} has no key `{key}`; ", nearest
    raise AssertionError(f"{section.__name__} has no field")


def _leaves(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if inner := _section_of(field.annotation):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
