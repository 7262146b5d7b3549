"""How fast optimizer actors are, by what they report."""

from flatpeak.controller.actor_rates import ActorRates
from flatpeak.workers.optimizer import Counters
from flatpeak.workers.update_report import UpdateReport, UpdateReports


def observed(rates: ActorRates, times: int, **seconds: float) -> None:
    """Updates of a million parameters each, which took so long."""
    for _ in range(times):
        rates.observe({who: UpdateReport(1_000_000, took) for who, took in seconds.items()})


def test_a_rate_is_the_median_of_the_last_updates():
    rates = ActorRates()
    observed(rates, 3, a=1.0, b=2.0)
    assert rates.of(["a", "b"]) == [None, None]
    observed(rates, 1, a=9.0, b=2.0)
    assert rates.of(["a", "b", "c"]) == [1e6, 5e5, None]
    observed(rates, 8, a=4.0, b=1.0)
    assert rates.of(["b", "a"]) == [1e6, 2.5e5]


def test_actors_that_differ_by_noise_count_as_alike():
    rates = ActorRates()
    observed(rates, 8, a=1.0, b=1.4)
    assert rates.of(["a", "b"]) == [None, None]
    observed(rates, 8, a=1.0, b=1.6)
    assert None not in rates.of(["a", "b"])


def test_what_is_too_short_to_measure_or_was_skipped_has_no_rate():
    rates = ActorRates()
    observed(rates, 8, a=0.004, b=0.04)
    for _ in range(8):
        rates.observe({"a": UpdateReport(0, 1.0), "b": UpdateReport(10, 5.0)})
    assert rates.of(["a", "b"]) == [None, None]


def test_an_actor_that_went_is_a_new_one_when_it_comes_again():
    rates = ActorRates()
    observed(rates, 8, a=1.0, b=3.0)
    observed(rates, 1, a=1.0)
    observed(rates, 3, a=1.0, b=1.0)
    assert rates.of(["a", "b"]) == [None, None]


def test_a_report_has_what_was_counted_since_the_one_before():
    reports, counters = UpdateReports(), Counters(updated_parameters=5, update_s=0.5)
    first = reports.next(counters)
    assert (first.parameters, first.seconds) == (5, 0.5)
    assert first.host.in_use_bytes > 0
    counters.updated_parameters, counters.update_s = 12, 0.75
    second = reports.next(counters)
    assert (second.parameters, second.seconds) == (7, 0.25)
    assert reports.next(counters).parameters == 0
