"""The dashboards as files."""

import json
from pathlib import Path

from flatpeak.controller.dashboards.boards import dashboards
from flatpeak.workers.errors import InputError


def rendered() -> dict[str, str]:
    """The text of each dashboard by file name."""
    return {f"{each['uid']}.json": json.dumps(each, indent=2) + "\n" for each in dashboards()}


def render_files(folder: Path) -> list[Path]:
    """Writes the dashboards into `folder`; returns the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, text in rendered().items():
            (folder / name).write_text(text)
            written.append(folder / name)
    except OSError as error:
        raise InputError(f"cannot write dashboards into {folder}: {error.strerror}") from None
    return written


def check_files(folder: Path) -> list[Path]:
    """The files in `folder` that are missing or not what this version renders."""
    return [
        folder / name
        for name, text in rendered().items()
        if not (folder / name).is_file() or (folder / name).read_text(errors="replace") != text
    ]
