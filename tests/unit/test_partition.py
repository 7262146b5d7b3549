"""Parts of a dimension cover it once, in order, and differ by at most one element."""

from itertools import pairwise

import pytest

from flatpeak.workers.partition import part, parts


@pytest.mark.parametrize(("total", "count"), [(10, 3), (5, 8), (0, 2), (7, 7), (50_257, 8)])
def test_parts_are_contiguous_balanced_and_complete(total: int, count: int):
    bounds = parts(total, count)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_an_index_outside_the_group_is_refused():
    with pytest.raises(AssertionError, match="part 2 of 2"):
        part(4, 2, 2)
