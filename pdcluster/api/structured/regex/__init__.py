"""Regular expressions of requests: parsed, compared, written."""
