"""How a dimension is cut over the ranks of a group: contiguous, balanced, possibly empty parts."""


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open interval [start, stop) of part `index` when `total` is cut into `parts`.

    The first `total % parts` parts hold one element more. Parts are empty when `total < parts`.
    """
    assert 0 <= index < parts, f"part {index} of {parts}"
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def parts(total: int, count: int) -> list[tuple[int, int]]:
    return [part(total, count, index) for index in range(count)]
