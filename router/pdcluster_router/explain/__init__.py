"""Why a request went where it went, and whether that was right."""
