"""Every asyncio loop of a test is patient: a stall of the machine is no time that passes in it."""

from __future__ import annotations

import asyncio

import pytest
from patient_loop import PatientPolicy


def pytest_configure(config: pytest.Config) -> None:
    asyncio.set_event_loop_policy(PatientPolicy())
