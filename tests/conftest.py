"""Settings that hold for every test."""

import os

from hypothesis import HealthCheck, settings

# A busy machine is no failure: hangs are caught by the timeout of every test. CI repeats the same
# examples, so that a red run says something about the change.
settings.register_profile(
    "flatpeak",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("flatpeak")
