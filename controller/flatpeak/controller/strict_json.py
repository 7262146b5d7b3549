"""JSON that every reader takes: numbers that are not finite are null in it."""

import json
import math
from typing import Any


def to_json(data: Any) -> str:
    """One line of strict JSON; numbers that are not finite become null."""
    return json.dumps(_null_for_nan(data), allow_nan=False)


def _null_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_for_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_null_for_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
