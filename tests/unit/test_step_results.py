"""What the results of several ranks come to."""

import pytest

from flatpeak.controller.step_results import straggler_of


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ([0.5, 0.125, 0.25], (1, 0.375)),
        ([0.5, 0.5], (0, 0.0)),
        ([0.5], (None, None)),
        ([None, None], (None, None)),
        ([0.5, None, 0.25], (None, None)),
    ],
)
def test_the_straggler_is_the_rank_that_waited_least(waits, found):
    assert straggler_of(waits) == found
