"""pdctl's commands: what an operator asks of one or several routers."""
