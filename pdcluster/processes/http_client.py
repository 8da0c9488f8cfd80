"""A connection of the standard library's HTTP client, with or without TLS."""

from __future__ import annotations

from http.client import HTTPConnection

from pdcluster.settings.tls_trust import TlsTrust, client_context


def http_connection(host: str, port: int, timeout_s: float, trust: TlsTrust | None = None) -> HTTPConnection:
    """trust: None: in clear text. Raises ConfigError."""
    return (
        HTTPConnection(host, port, timeout=timeout_s)
        if trust is None
        else _NamedConnection(host, port, timeout_s, trust)
    )


class _NamedConnection(HTTPConnection):
    """Over TLS, to a certificate of another name than the host's, if need be."""

    def __init__(self, host: str, port: int, timeout_s: float, trust: TlsTrust) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._context, self._name = client_context(trust.ca), trust.name or host

    def connect(self) -> None:
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name)
