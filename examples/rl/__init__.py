"""A whole loop of reinforcement learning against a cluster: rollouts, an optimiser, pushed weights."""
