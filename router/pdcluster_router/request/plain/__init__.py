"""The short way of requests that meet nothing unusual."""
