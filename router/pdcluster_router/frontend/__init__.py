"""Endpoints over HTTP and gRPC: preparation and answers."""
