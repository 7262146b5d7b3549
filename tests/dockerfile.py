"""A Dockerfile, as far as its instructions go."""

import re
from dataclasses import dataclass
from pathlib import Path

KNOWN = frozenset({"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "WORKDIR"})


@dataclass(frozen=True)
class Instruction:
    name: str
    arguments: str

    @property
    def words(self) -> list[str]:
        return [word for word in self.arguments.split() if not word.startswith("--")]


def instructions(path: Path) -> list[Instruction]:
    """In order; raises ValueError at what is no instruction. Comments may stand between lines."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    logical = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    found = []
    for line in filter(None, map(str.strip, logical)):
        name, _, arguments = line.partition(" ")
        if name not in KNOWN or not arguments:
            raise ValueError(f"{path.name} has a line that is no instruction: {line}")
        found.append(Instruction(name, arguments))
    return found
