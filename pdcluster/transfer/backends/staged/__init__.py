"""Backends over a transfer library that cannot cancel a write: `backend` says how a write goes."""
