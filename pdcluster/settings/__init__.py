"""Settings: declared once, read from flags, variables and TOML files."""
