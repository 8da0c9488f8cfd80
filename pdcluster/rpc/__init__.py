"""Generated gRPC code, and conversions from and to plain values."""
