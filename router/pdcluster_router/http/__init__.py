"""HTTP/1.1 connections and exchanges. Knows no endpoint."""
