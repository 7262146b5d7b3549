"""The files of `deploy/`, and what they say of themselves in comments."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGE = f"{PROJECT['name']}:{PROJECT['version']}"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())

_UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "gb": 2**30, "mb": 2**20}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def nbytes(quantity: str) -> int:
    """Of a quantity of Kubernetes, or of Docker, whose gb are of 1024 as well."""
    number, unit = quantity[:-2], quantity[-2:]
    return int(number) * _UNITS[unit]


def commands(path: Path) -> list[list[str]]:
    """The commands in the comment on top of a file, each in its words."""
    comment = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#"))
    text = "\n".join(comment).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("   ")]


def gibibytes_said(path: Path) -> list[float]:
    """The sizes in comments, which are to be those of a plan."""
    comments = re.findall(r"#(.*)", path.read_text())
    return [float(found) for line in comments for found in re.findall(r"([0-9.]+) GiB", line)]


def is_pinned(image: str) -> bool:
    return re.fullmatch(r"[a-z/]+:v?[0-9]+\.[0-9]+\.[0-9]+", image) is not None
