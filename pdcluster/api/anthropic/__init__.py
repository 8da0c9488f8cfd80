"""Shapes and limits of OpenAI requests and replies."""
