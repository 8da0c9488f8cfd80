"""The version of the package. Its build reads it here."""

VERSION = "0.1.0"
