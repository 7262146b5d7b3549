"""Which of its tokens a rank gives to each chunk.

Positions are cut into windows of as many as there are steps; each step takes one position of every
window, so that every chunk is like the whole. Which one turns from window to window by the golden
angle: a fixed stride meets the same phase of everything that repeats in the layer with a period
that shares a factor with it, and of all turns this one comes near a repetition last.
"""

from dataclasses import dataclass

import torch

_TURN = 1 << 16
_GOLDEN_ANGLE = 25033  # of _TURN: (3 - sqrt(5)) / 2


@dataclass(frozen=True)
class Share:
    """The tokens of a rank that are step `step` of `steps`; none where there are no steps."""

    step: int = 0
    steps: int = 0

    def size(self, tokens: int) -> int:
        """How many of `tokens` positions they are."""
        return len(range(self.step, tokens, self.steps)) if self.steps else 0

    def positions(self, tokens: int, device: torch.device) -> torch.Tensor:
        """[size] int64, ascending."""
        windows = torch.arange(self.size(tokens), device=device)
        if self.steps <= 1:  # none, or all of them
            return windows
        places = _turned(windows, self.steps).add_(self.step).remainder_(self.steps)
        # The last window may be cut short, so it keeps its order.
        places[tokens // self.steps :] = self.step
        return windows.mul_(self.steps).add_(places)


def window_positions(windows: range, steps: range, of: int, device: torch.device) -> torch.Tensor:
    """[len(windows), len(steps)] int64: the position that each of `steps`, among `of`, takes of
    each of `windows`, all of them whole."""
    window = torch.arange(windows.start, windows.stop, device=device)[:, None]
    step = torch.arange(steps.start, steps.stop, device=device)
    places = (_turned(window, of) + step).remainder_(of)
    return places.add_(window.mul_(of))


def _turned(windows: torch.Tensor, steps: int) -> torch.Tensor:
    """By how many places each window is turned."""
    return (windows * _GOLDEN_ANGLE).remainder_(_TURN).mul_(steps).bitwise_right_shift_(16)
