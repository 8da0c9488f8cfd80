"""Files of requests: `pdctl batch run`."""
