"""The OpenAI API without a server: validation of JSON bodies, and lines of event streams."""
