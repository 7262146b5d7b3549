import pytest
import torch

from flatpeak.workers.dispatch.shares import Share, window_positions

CPU = torch.device("cpu")


def shares(tokens: int, steps: int) -> list[torch.Tensor]:
    return [Share(step, steps).positions(tokens, CPU) for step in range(steps)]


@pytest.mark.parametrize("steps", [1, 2, 7, 16, 61])
@pytest.mark.parametrize("tokens", [0, 1, 6, 61, 1000])
def test_the_steps_share_the_tokens_out_evenly(tokens: int, steps: int):
    taken = shares(tokens, steps)
    assert torch.cat(taken).sort().values.tolist() == list(range(tokens))
    for step, positions in enumerate(taken):
        assert len(positions) == Share(step, steps).size(tokens)
        assert len(positions) in (tokens // steps, -(-tokens // steps))
        assert positions.tolist() == sorted(positions.tolist())


def test_a_share_without_steps_is_empty():
    assert Share().size(9) == len(Share().positions(9, CPU)) == 0


def test_a_step_takes_one_position_of_every_window():
    windows = shares(700, 7)[3] // 7
    assert windows.tolist() == list(range(100))


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_some_windows_and_steps_are_those_of_the_shares(steps: int):
    whole = torch.stack(shares(40 * steps, steps), dim=1)
    some = range(steps // 3, steps)
    part = window_positions(range(11, 29), some, steps, CPU)
    assert torch.equal(part, whole[11:29, some.start : some.stop])


@pytest.mark.parametrize("period", [2, 4, 7, 8, 32])
@pytest.mark.parametrize("steps", [2, 3, 4, 8, 16, 24, 32])
def test_what_repeats_in_a_layer_spreads_over_all_chunks(steps: int, period: int):
    mean = 7936 / steps / period
    for positions in shares(7936, steps):
        phases = torch.bincount(positions % period, minlength=period)
        assert 0.75 * mean < int(phases.min()) <= int(phases.max()) < 1.3 * mean
