"""One request's life: attempts, retries, timers, forks."""
