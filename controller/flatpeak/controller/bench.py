"""The frame around the benchmarks of a source checkout.

A bench is a module `tests/benchmarks/NAME.py` with

    DEFAULTS: dict[str, int | float | str | bool | tuple]
    def run(config: dict) -> tuple[bool, list[dict], dict[str, float | None]]

which measures both sides in one process and returns whether they agreed, the rows, and the ratios.
The frame parses options against DEFAULTS, where a tuple stands for an option that may be repeated
and takes values with commas between them, adds the versions, and withholds the ratios where the
results were not exact: a wrong answer has no speed. The module's docstring is its help.
"""

import ast
import difflib
import importlib.util
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from flatpeak.workers.errors import InputError

BENCHES = Path("tests") / "benchmarks"
Scalar = int | float | str | bool
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    bench: str
    exact: bool
    ratios: dict[str, float | None]
    rows: list[dict[str, Any]]
    config: dict[str, Value]
    versions: dict[str, str | int | None]


def run_bench(name: str, options: Sequence[str], *, start: Path | None = None) -> BenchReport:
    """Run the bench `name` of the checkout around `start` (the working directory by default).

    `options` are command line words like `--ranks 4`. Raises InputError when there is no such bench
    or option; what the bench itself raises passes through.
    """
    root = find_checkout(start or Path.cwd())
    module = load_bench(root, name)
    config = module.DEFAULTS | parse_options(options, module.DEFAULTS)
    with redirect_stdout(sys.stderr):  # standard output carries the report alone
        exact, rows, ratios = module.run(dict(config))
    return BenchReport(
        bench=name,
        exact=exact,
        ratios=ratios if exact else {},
        rows=rows,
        config=config,
        versions=versions(root),
    )


def find_checkout(start: Path) -> Path:
    """The source checkout around `start`, else the one that this package was imported from."""
    here, package_root = start.resolve(), Path(__file__).resolve().parents[3]
    for folder in (here, *here.parents, package_root):
        if (folder / BENCHES).is_dir() and (folder / "controller" / "flatpeak").is_dir():
            return folder
    raise InputError(
        f"no source checkout with {BENCHES} around {start}; the benches are not part of the "
        "installed package, so run this inside a checkout"
    )


def list_benches(root: Path) -> list[str]:
    names = (path.stem for path in (root / BENCHES).glob("*.py"))
    return sorted(name for name in names if not name.startswith(("_", "test_", "conftest")))


def describe_benches(*, start: Path | None = None) -> str:
    """One line a bench of the checkout around `start`, without importing any."""
    root = find_checkout(start or Path.cwd())
    names = list_benches(root)
    width = max(map(len, names), default=0)
    lines = []
    for name in names:
        text = (root / BENCHES / f"{name}.py").read_text(encoding="utf-8")
        lines.append(
            f"  {name:{width}}  {_first_line(ast.get_docstring(ast.parse(text)))}".rstrip()
        )
    return "\n".join(["Benches:", *lines])


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def describe_bench(name: str, *, start: Path | None = None) -> str:
    """What the bench says of itself, and its options."""
    module = load_bench(find_checkout(start or Path.cwd()), name)
    return describe_options(module.__doc__, module.DEFAULTS)


def describe_options(
    text: str | None,
    defaults: Mapping[str, Value],
    *,
    title: str = "Options and their defaults",
) -> str:
    """`text`, and under `title` one line for each option of `defaults`."""
    names = {
        k: f"{_flag(k)} ..." if isinstance(v, tuple) else _flag(k) for k, v in defaults.items()
    }
    width = max(map(len, names.values()), default=0)
    lines = [f"  {names[key]:{width}}  {_default(value)}" for key, value in defaults.items()]
    note = "; ... takes several values, with commas or by repetition"
    several = any(isinstance(value, tuple) for value in defaults.values())
    head = [text.strip(), ""] if text else []
    return "\n".join([*head, f"{title}{note if several else ''}:", *lines])


def _default(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_default, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_bench(root: Path, name: str) -> ModuleType:
    if name not in list_benches(root):
        raise InputError(
            f"no bench {name!r} in {root / BENCHES}; there are: "
            f"{', '.join(list_benches(root)) or 'none'}"
        )
    # Benches share the process harness with the tests.
    tests = str(root / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    location = root / BENCHES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"flatpeak_bench_{name}", location)
    assert spec is not None, f"{location} has no loader"
    assert spec.loader is not None, f"{location} has no loader"
    module = importlib.util.module_from_spec(spec)
    # Registered, because the harness ships a bench's functions to its ranks by module name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def parse_options(options: Sequence[str], defaults: dict[str, Value]) -> dict[str, Value]:
    """`--key value` and `--key=value` words, typed as the default of the same name.

    A switch needs no value: `--key` alone is true. Each use of an option whose default is a tuple
    adds its values, typed as the tuple's first.
    """
    values: dict[str, Value] = {}
    words = deque(options)
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            raise InputError(f"{word!r} is no option; options are {_flags(defaults)}")
        flag, equals, text = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean {_flag(near[0])}? There are " if near else "there are "
            raise InputError(f"no option {flag}; {hint}{_flags(defaults)}")
        default = defaults[key]
        if not equals:
            text = _next_value(flag, words, default)
        if isinstance(default, tuple):
            given = tuple(_typed(flag, part, default[0]) for part in text.split(","))
            earlier = values.get(key, ())
            assert isinstance(earlier, tuple), f"{key} is {earlier!r}"
            values[key] = earlier + given
        else:
            values[key] = _typed(flag, text, default)
    return values


def check_ranges(config: Mapping[str, Value], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raise InputError for the first value outside its least and most, which are legal."""
    for key, (least, most) in ranges.items():
        value = config[key]
        for each in value if isinstance(value, tuple) else (value,):
            # Written so that NaN is refused too.
            if not (isinstance(each, int | float) and least <= each <= most):
                legal = f"{least} or more" if most == inf else f"from {least} to {most}"
                raise InputError(f"{_flag(key)} {each}: should be {legal}")


def _next_value(flag: str, words: deque[str], default: Value) -> str:
    if isinstance(default, bool) and (not words or words[0].startswith("--")):
        return "true"
    if not words:
        example = default[0] if isinstance(default, tuple) else default
        raise InputError(f"{flag} needs a value, like {flag} {example}")
    return words.popleft()


def _typed(flag: str, text: str, default: Scalar) -> Scalar:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise InputError(f"{flag} {text}: should be true or false")
        return text == "true"
    try:
        return type(default)(text)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise InputError(f"{flag} {text}: should be {kind}, like {default}") from None


def _flags(defaults: Mapping[str, Value]) -> str:
    return ", ".join(map(_flag, defaults)) or "none"


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def versions(root: Path) -> dict[str, str | int | None]:
    """What the numbers were measured with; packages are asked without importing them."""
    packages = ("flatpeak", "torch", "triton", "ray", "transformers")
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "commit": _commit(root),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here: the numbers stand without a commit
    return done.stdout.strip() if done.returncode == 0 else None
