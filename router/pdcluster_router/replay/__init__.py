"""The production policies over a trace, in simulated time."""
