"""What holds for every test: time stands still while the machine does, no property is judged by how fast its examples
are, and all of `make test` draws the same examples each time. `make test-full` draws new ones, and more. Long files are
spread over all workers."""

from __future__ import annotations

import asyncio

import drawn_examples
import hypothesis
import pytest
from patient_loop import PatientPolicy


def pytest_configure(config: pytest.Config) -> None:
    asyncio.set_event_loop_policy(PatientPolicy())
    drawn_examples.is_full = config.option.markexpr != "not full"
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "tests", deadline=None, suppress_health_check=slow, derandomize=not drawn_examples.is_full, database=None
    )
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    import spread  # needs xdist, without which nobody asks

    return spread.scheduling(config, log)
