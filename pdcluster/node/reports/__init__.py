"""What a node says of itself: load reports to routers, its health port, and timed steps."""
