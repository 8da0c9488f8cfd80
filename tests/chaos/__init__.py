"""Chaos: a cluster of processes under a load of every feature, with seeded faults. `python -m tests.chaos --help`."""
