"""Which rows compute which tokens in the next step. Pure."""
