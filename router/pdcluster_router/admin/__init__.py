"""What operators ask of a router."""
