"""What single values of the job spec may be: what the software that reads them can hold."""

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

LARGEST_INT = 2**63 - 1
LEAST_NORMAL_FP32, LARGEST_FP32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
MOST_PROCESSES = 16_384
MOST_SECONDS = 30 * 24 * 3600.0
MOST_DEPTH = 64
MOST_VALUES = 100_000


def _counted(value: Any) -> Any:
    """4GB and 512MiB as a number of bytes; what is not text is for the strict integer to judge."""
    if not isinstance(value, str):
        return value
    parts = re.fullmatch(r"([0-9]{1,40}(?:\.[0-9]{1,40})?) ?(?:([kKMGTP])(i?))?B", value)
    if parts is None:
        raise PydanticCustomError("bytes", "should be bytes, like 4000000000, 4GB or 512MiB")
    number, prefix, binary = parts.groups()
    power = "KMGTP".index(prefix.upper()) + 1 if prefix else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def _held_by_fp32(value: float) -> float:
    # Subnormal numbers lose digits, and are 0 on some devices.
    if value and not LEAST_NORMAL_FP32 <= abs(value) <= LARGEST_FP32:
        raise PydanticCustomError("fp32", "should be a number of float32, from 1.2e-38 to 3.4e+38")
    return value


def _json_like(value: Any) -> Any:
    """A model's configuration, of which the fields belong to others; raises at what no JSON has."""
    if _values_in(value, {}) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values, with those of aliases")
    if problem := _problem_in(value, (), 0):
        raise ValueError(problem)
    return value


def _values_in(value: Any, counted: dict[int, int]) -> int:
    """How many there are with aliases written out; in no more time than without."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in counted:
        counted[id(value)] = 0  # as long as it is counted: what holds itself is refused elsewhere
        inner = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_values_in(each, counted) for each in inner)
    return counted[id(value)]


def _problem_in(value: Any, path: tuple[str, ...], depth: int) -> str | None:
    where = ".".join(path)
    if depth > MOST_DEPTH:  # or a YAML alias of something around it
        return f"{path[0]} is nested deeper than {MOST_DEPTH} levels"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        below = (_problem_in(inner, (*path, name_of(key)), depth + 1) for key, inner in items)
        return next(filter(None, below), None)
    if isinstance(value, int) and not -LARGEST_INT <= value <= LARGEST_INT:
        return f"{where} = {shown(value)}: should be at most {LARGEST_INT}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} = {value}: should be a finite number"
    if not isinstance(value, str | int | float | None):
        return f"{where} = {shown(value)}: should be text, a number, true, false or null"
    return None


def name_of(key: Any) -> str:
    """A key as a dotted path has it; what would garble a terminal is quoted."""
    return shortened(key) if isinstance(key, str) and key.isprintable() else shown(key)


def _one_path(text: str) -> str:
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise PydanticCustomError("path", "should be a path that a file system can hold")
    return text


def shown(value: Any) -> str:
    """`value` as messages have it: cut where it is long, and never refused by Python."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits, or something with one in it
        if not isinstance(value, int):
            return f"a {type(value).__name__} with a huge integer"
        return f"an integer of {int(value.bit_length() * math.log10(2)) + 1} digits"
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 120 else text[:120] + "..."


def _one_host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_:-]{1,63}(\.[A-Za-z0-9_-]{1,63})*", text) or len(text) > 253:
        raise PydanticCustomError("host", "should be the name or address of a host, or node")
    return text


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Bytes = Annotated[int, Field(ge=1, le=LARGEST_INT), BeforeValidator(_counted)]
BytesOrZero = Annotated[int, Field(ge=0, le=LARGEST_INT), BeforeValidator(_counted)]
Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_held_by_fp32)]
FloatOrZero = Annotated[float, Field(ge=0), AfterValidator(_held_by_fp32)]
# The last numbers of float32 before 1 are those where 1 - beta is not 0 yet.
Beta = Annotated[float, Field(ge=0, le=0.9999999), AfterValidator(_held_by_fp32)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]
Multiple = Annotated[float, Field(ge=1, le=1e6)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_one_path)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Host = Annotated[str, AfterValidator(_one_host)]
JsonLike = Annotated[dict[str, Any], AfterValidator(_json_like)]
