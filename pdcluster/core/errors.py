"""Every error pdcluster raises on purpose, as one tree.

    PdclusterError
    ├─ BadRequest            the caller must change the request      400
    │  ├─ Unauthorized       no API key, or one nobody knows         401
    │  ├─ UnknownModel                                               404
    │  ├─ UnknownName                                                404
    │  ├─ ContextTooLong     prompt and output exceed the model      400
    │  └─ RequestTooLarge                                            413
    ├─ Overloaded            capacity exists but is busy             429
    ├─ Unavailable           no node can serve this at all           503
    │  └─ NoNodeTakesWork    for now; a request may wait for one     503
    ├─ ModelChanged          its model was replaced meanwhile        503
    ├─ RequestStopped        it lost nodes, and may be why           500
    ├─ DeadlineExceeded      a stage ran out of time                 504
    ├─ Cancelled             the client left                         499
    ├─ ConfigError           bad flag, file or environment; at start
    ├─ ModelError            a checkpoint we cannot serve exactly; at load
    ├─ ProtocolError         a peer sent something wrong: dropped and counted
    ├─ TransferError         KV did not arrive (retryable on other pages)
    │  └─ PeerUnreachable
    ├─ NodeLost              the node behind an attempt is gone (retryable)
    │  └─ NodeStuck          it answers, but its engine makes no progress
    ├─ NodeDrains            the node gives its work to others (retryable)
    │  └─ OutgrewNode        the answer is longer than the node takes
    └─ IntegrityError        our own bookkeeping is broken: a bug

A message names the thing, the value and the way out. This module translates nothing: a library's errors are translated
where the library is called.
"""

from __future__ import annotations


class PdclusterError(Exception):
    """Base of all deliberate errors; `code` is the stable word for metrics, wire and API."""

    code = "internal"
    http_status = 500
    retryable = False


class BadRequest(PdclusterError):
    """The request can never succeed as sent. `param` names the offending field, when there is one."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unauthorized(BadRequest):
    code = "invalid_api_key"
    http_status = 401


class UnknownModel(BadRequest):
    code = "model_not_found"
    http_status = 404


class UnknownName(BadRequest):
    """No node, request, decision or path of that name is known here (any more)."""

    code = "not_found"
    http_status = 404


class ContextTooLong(BadRequest):
    """The code, and how the message begins, are what clients know from OpenAI. Some look for the code in the
    message."""

    code = "context_length_exceeded"

    def __init__(self, max_len: int, however: str, param: str | None = None, num_prompt: int | None = None) -> None:
        """num_prompt: tokens of a prompt that is too long by itself, or so many that it has more; None where its
        output is.
        """
        self.max_len, self.num_prompt = max_len, num_prompt
        limit = f"This model's maximum context length is {max_len} tokens, at least one of them for the output."
        super().__init__(f"{limit} However, {however} ({self.code})", param)


class RequestTooLarge(BadRequest):
    code = "request_too_large"
    http_status = 413


class Overloaded(PdclusterError):
    """Capacity exists but is busy; the caller may retry after `retry_after_s` seconds. `reason` is a stable word for
    metrics: which bound it was."""

    code = "overloaded"
    http_status = 429
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0, reason: str = "busy") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class Crowded(Overloaded):
    """This process has too much to do at once, whatever the client does."""

    http_status = 503


class Unavailable(PdclusterError):
    code = "unavailable"
    http_status = 503


class NoNodeTakesWork(Unavailable):
    """All nodes that could serve the request are gone, cordoned or draining. One may come back."""


class ModelChanged(PdclusterError):
    """What the request was prepared for is served no more: other text or other weights have its model's name. It waits
    for nothing; sent again, it is prepared anew."""

    code = "model_changed"
    http_status = 503


class RequestStopped(PdclusterError):
    """Several nodes were lost one after another while they had the request. Sent again, it may end as many more."""

    code = "request_stopped"


class DeadlineExceeded(PdclusterError):
    """`stage` says which clock ran out: queue, handshake, transfer, liveness or request."""

    code = "deadline_exceeded"
    http_status = 504

    def __init__(self, message: str, stage: str = "request") -> None:
        super().__init__(message)
        self.stage = stage


class Cancelled(PdclusterError):
    code = "cancelled"
    http_status = 499


class ConfigError(PdclusterError):
    code = "bad_config"


class NameTaken(PdclusterError):
    """Another process of the cluster has that name, and may still live. `retry_after_s`: how long it may be silent."""

    code = "name_taken"
    retryable = True

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unservable(Unavailable):
    """What waiting does not mend: the model that the nodes have can never be served."""

    code = "unsupported_model"


class ModelError(PdclusterError):
    code = "unsupported_model"


class ProtocolError(PdclusterError):
    code = "protocol"


class OtherProtocol(ProtocolError):
    """A peer speaks another version of the protocol."""


class TransferError(PdclusterError):
    code = "transfer_failed"
    retryable = True


class PeerUnreachable(TransferError):
    code = "peer_unreachable"


class NodeLost(PdclusterError):
    code = "node_lost"
    http_status = 503
    retryable = True


class NodeStuck(NodeLost):
    """The node answers, but its engine makes no progress."""

    code = "node_stuck"


class NodeDrains(PdclusterError):
    """Planned: no failure of the node or of the request."""

    code = "node_draining"
    http_status = 503
    retryable = True


class OutgrewNode(NodeDrains):
    """The answer reached the longest request that the node takes. A larger node goes on with it."""


class IntegrityError(PdclusterError):
    code = "integrity"
