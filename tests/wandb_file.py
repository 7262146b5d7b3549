"""Reads what Weights & Biases writes offline, which nothing public of its package does."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_FILE_HEADER, _HEADER, _BLOCK = 7, struct.Struct("<IHB"), 32 * 1024


def records(path: Path) -> list[tuple[str, Any]]:
    """Kind and content of each record of a .wandb file, a log in the format of LevelDB."""
    found = []
    for data in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        found.append((kind, getattr(record, kind)))
    return found


def figures(history: Any) -> dict[str, Any]:
    """What one call of `log` gave, by name."""
    return {
        item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item
    }


def _messages(content: bytes) -> Iterator[bytes]:
    at, parts = _FILE_HEADER, []
    while at + _HEADER.size <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER.size:  # no header is split: zeros fill the block
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        parts.append(content[at : at + size])
        at += size
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []
