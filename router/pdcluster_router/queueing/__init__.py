"""Which request goes, waits or is refused."""
