"""Every message between router, prefill node and decode node, as frozen msgspec structs of plain values.

They know no torch, no protobuf, no HTTP and no sockets. Sizes and ranges (`bounds`, and more in `wire.codec`) are
checked when a frame is decoded. Durations are seconds; times never cross a machine (a deadline travels as seconds that
are left). Positions of output tokens count from 0 over the whole request, whatever attempt produced them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from pdcluster.core.bounds import (
    MAX_ITEMS,
    MAX_OPAQUE_BYTES,
    MAX_PATHS,
    MAX_RANKS,
    MAX_REASONS,
    MAX_VECTOR_BYTES,
    AdapterName,
    Adverts,
    BigCount,
    Count,
    Dimensions,
    Id,
    Number,
    NumRanks,
    Percent,
    Positive,
    Rank,
    Reasons,
    Seconds,
    SecondsLeft,
    Text,
    Unsigned,
)
from pdcluster.core.reported import BreakerName as BreakerName
from pdcluster.core.reported import CostReport as CostReport
from pdcluster.core.reported import PathLoad as PathLoad
from pdcluster.core.reported import Value
from pdcluster.core.sampling import Sampling as Sampling
from pdcluster.core.sampling import Shaping as Shaping
from pdcluster.core.sampling import TokenLogprobs as TokenLogprobs
from pdcluster.core.weights import MAX_TENSORS, Digest, WeightsVersion, WeightTensors

Role = Literal["prefill", "decode", "mixed"]
# Refused.param where the node does not serve what the request was prepared for.
MODEL_PARAM = "model"
# The same for block hashes that are not those of the tokens.
HASHES_PARAM = "hashes"
FinishReason = Literal["stop", "length", "eos"]
RefusedLeg = Literal["prefill", "reserve", "deliver"]

HASH_BYTES = 16


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, 4 bytes each."""
    return array("i", tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`; raises ValueError when the length is no multiple of 4."""
    values = array("i")
    values.frombytes(packed)
    return values.tolist()


class NodeMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that is said; one or more of them are a frame."""


# ---------------------------------------------------------------- what is asked of a node


class Work(Value, frozen=True, array_like=True):
    """One attempt of one request, as every leg needs to know it.

    token_ids: packed int32 of the prompt and of all tokens emitted by earlier attempts; num_prompt of them are the
    prompt. hashes: the chained block hashes of token_ids, HASH_BYTES each, full hash blocks only. hash_root: what
    stands before the chain's first block (kv.hashing.chain_root), so that a node can name what it decodes after a
    prompt shorter than a stretch; empty: such output is not cached. trace: the attempt's span
    (TraceContext.pack), above the node's own; empty: it is not traced. model: digest of the model that the router
    prepared it for (NodeCard.model_digest); empty: not said. adapter: the LoRA adapter of that model, by name; empty:
    none. is_batch: nobody waits for it: it gives way to all other work."""

    request: Id
    attempt: Count
    token_ids: bytes
    num_prompt: Positive
    hashes: bytes
    sampling: Sampling
    deadline_s: SecondsLeft
    hash_root: bytes = b""
    trace: bytes = b""
    model: Text = ""
    adapter: AdapterName = ""
    is_batch: bool = False


class Endpoint(Value, frozen=True, array_like=True):
    """How to reach one boot of one node. adverts: (backend name, opaque bytes that backend's `connect` understands),
    best first. link_key: names the cluster key that it listens with; "": none, or it does not say."""

    node: Id
    incarnation: Id
    address: str
    adverts: Adverts = ()
    link_key: Text = ""


class Ticket(Value, frozen=True, array_like=True):
    """A slot's write permit. The writer may write the KV of tokens [cached_tokens, num_tokens) into `pages`, and
    nothing else. weights: digest of those that the reader computes with; no other's KV may be written.

    pages: packed int32 ids in the reader's region `region`, in token order from token 0 on (the first
    cached_tokens/page_tokens of them are already filled and must not be written). nonce is random and names the ticket
    on the wire. ranks: those of the reader, each with a region of its own from `region` on, all with the same page ids;
    page_bytes: of one rank's page."""

    nonce: Unsigned
    request: Id
    attempt: Count
    reader: Endpoint
    writer: Endpoint
    region: Count
    pages: bytes
    page_tokens: Positive
    page_bytes: Number
    num_tokens: Positive
    cached_tokens: Count
    deadline_s: SecondsLeft
    ranks: NumRanks = 1
    weights: Digest = ""


class WeightsTarget(Value, frozen=True, array_like=True):
    """Where the tensors of one version may be written, once. receiver.adverts: of media that are open for this alone.
    starts: where each tensor begins in region `region`, in the order in which the tensors were named. is_sealed: our
    own sockets are encrypted."""

    nonce: Unsigned
    receiver: Endpoint
    region: Count
    starts: Annotated[tuple[BigCount, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    is_sealed: bool = False


# xxh3-128 of tensors by name, as `checkpoint.weights_digest` takes them.
TensorDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
TensorDigests = Annotated[tuple[tuple[Text, TensorDigest], ...], msgspec.Meta(max_length=MAX_TENSORS)]


class Pull(Value, frozen=True, array_like=True):
    """Where more of a prompt's KV is cached than on the node that shall compute it: `holder` has that of its first
    num_tokens tokens. holder.adverts are not used."""

    holder: Endpoint
    num_tokens: Positive


class Pooling(Value, frozen=True, array_like=True):
    """What a prompt is computed for where no token is wanted: one vector. dimensions: its length; 0: the model's
    own."""

    dimensions: Dimensions = 0


# ---------------------------------------------------------------- router → node


class Hello(NodeMessage, frozen=True, array_like=True):
    """First frame of a link, again after every reconnect: who speaks, and what it believes is open there."""

    kind: Literal["router", "node"]
    # (request, attempt, next output position expected) for each attempt the router still waits for.
    open: Annotated[tuple[tuple[Id, Count, Count], ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()


class Ping(NodeMessage, frozen=True, array_like=True):
    """Renews the sender's lease. A router that stops pinging is gone after `lease_s` of the node's config."""


class Prefill(NodeMessage, frozen=True, array_like=True):
    """Compute the prompt's KV and sample the first token. remote: the KV goes to a decode node once its ticket is
    delivered; otherwise the node goes on decoding itself (mode local). pull: KV to fetch first; when that fails, the
    node computes it. fork_of: a request of the same prompt that decodes here or soon will; its KV is shared, once it is
    here. pooling: answer with the prompt's embedding, and sample nothing; mode local."""

    work: Work
    remote: bool
    pull: Pull | None = None
    fork_of: Id | None = None
    pooling: Pooling | None = None


class Reserve(NodeMessage, frozen=True, array_like=True):
    """Reserve a slot for KV that `writer` will push. writer.address is where the node can send it an Abort; its adverts
    are not used."""

    work: Work
    writer: Endpoint


class Deliver(NodeMessage, frozen=True, array_like=True):
    """Hand a ticket to the prefill node. Its attempt may be later than the Prefill's: parked KV is sent again without
    recompute."""

    ticket: Ticket


class Cancel(NodeMessage, frozen=True, array_like=True):
    """Stop this attempt (and earlier ones) of the request, on whichever leg it runs. Idempotent."""

    request: Id
    attempt: Count
    reason: Text


class Release(NodeMessage, frozen=True, array_like=True):
    """The prefill node may drop the KV it keeps parked for this request."""

    request: Id


class Manage(NodeMessage, frozen=True, array_like=True):
    """An operator's wish for the node: another role, or no new work (cordoned). None leaves that as it is. Idempotent;
    number names the answer. moves: end what runs here, so that routers go on with it elsewhere."""

    number: BigCount
    role: Role | None = None
    cordoned: bool | None = None
    moves: bool = False


class ManageAdapter(NodeMessage, frozen=True, array_like=True):
    """An operator's wish: load a LoRA adapter from a directory on the node's machine, or unload it (path None).
    Idempotent; number names the answer."""

    number: BigCount
    name: AdapterName
    path: Text | None = None


class PrepareWeights(NodeMessage, frozen=True, array_like=True):
    """Load other weights of the same model beside those that serve. version.digest: what they must have, "" for
    whatever they have. source: a directory or file on the node's machine, or a hub's ORG/NAME; "": the model that the
    node was started with; node:NAME: the memory of that node, which serves the version or has it ready. Answered when
    they are ready to be switched to, or cannot be; the node goes on serving. Idempotent; number names the answer."""

    number: BigCount
    version: WeightsVersion
    source: Text


class ReceiveWeights(NodeMessage, frozen=True, array_like=True):
    """Take weights of the same model that `writer` will write; of it only node and incarnation are used. Answered with
    a target, without one where the node has that version, or refused before any byte is taken. The weights become
    ready by CommitWeights. A later one replaces an unfinished one. number names the answer."""

    number: BigCount
    version: WeightsVersion
    writer: Endpoint
    tensors: WeightTensors


class CommitWeights(NodeMessage, frozen=True, array_like=True):
    """All bytes of the version are written; these are the digests of its tensors. Answered as PrepareWeights, with an
    error where another byte landed. Idempotent; number names the answer."""

    number: BigCount
    version: WeightsVersion
    digests: TensorDigests


class SwitchWeights(NodeMessage, frozen=True, array_like=True):
    """Serve the prepared weights of that epoch, as a new boot of the node. It takes no new work from now on. What runs
    may end within finish_s; what is left then moves to other nodes. share: of the requests that name no weights, in
    percent, that the new weights may get. Answered only where it is not done: then the old weights serve on."""

    number: BigCount
    epoch: BigCount
    finish_s: Seconds
    share: Percent = 100.0


class SleepNode(NodeMessage, frozen=True, array_like=True):
    """Give the memory of weights and KV back to the system, as a new boot of the node that takes no work. What runs
    ends as for SwitchWeights. The node wakes as by a load: PrepareWeights, of the same version or another one, and
    SwitchWeights. Answered where it is not done, or where the node sleeps already."""

    number: BigCount
    finish_s: Seconds


class DropWeights(NodeMessage, frozen=True, array_like=True):
    """Forget prepared weights, and free their memory. Idempotent."""

    number: BigCount


class ShareWeights(NodeMessage, frozen=True, array_like=True):
    """Change the share of requests that the node's weights may get, in percent."""

    number: BigCount
    share: Percent


class AskCache(NodeMessage, frozen=True, array_like=True):
    """Cache deltas were missed: send a snapshot now."""


class FetchFile(NodeMessage, frozen=True, array_like=True):
    """Ask for a piece of one of the model card's files (tokenizer.json, chat template, …)."""

    name: Id
    offset: BigCount


# ---------------------------------------------------------------- node → router


class TokenRow(Value, frozen=True, array_like=True):
    """New output tokens of one attempt, the first of them at `position`."""

    request: Id
    attempt: Count
    position: Count
    tokens: tuple[Count, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class LegTimings(Value, frozen=True, array_like=True):
    """Seconds spent on one node by one attempt; a leg fills what it knows.

    queue: arrival → first scheduled; prefill: first scheduled → first token; transfer: first write submitted → last
    write done; exposed: first token → commit acknowledged; decode: first decode step → last token. cached_tokens: those
    whose KV was not computed; pulled_tokens of them were fetched from another node."""

    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    exposed_s: Seconds = 0.0
    transfer_bytes: BigCount = 0
    decode_s: Seconds = 0.0
    decode_tokens: Count = 0
    cached_tokens: Count = 0
    backend: Text = ""
    pulled_tokens: Count = 0


class Welcome(NodeMessage, frozen=True, array_like=True):
    """Answer to Hello. `lost`: those attempts of Hello.open that this boot of the node does not know (any more)."""

    role: Role
    lost: Annotated[tuple[tuple[Id, Count], ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()


class Scheduled(NodeMessage, frozen=True, array_like=True):
    """The prefill node took the request out of its queue: now is the time to reserve. cached_tokens: found in its
    cache; None where its engine says that later."""

    request: Id
    attempt: Count
    cached_tokens: Count | None = 0


class Computed(NodeMessage, frozen=True, array_like=True):
    """The prefill node has the prompt's KV and says no token: its decode node makes the first one. cached_tokens: as in
    Scheduled."""

    request: Id
    attempt: Count
    cached_tokens: Count = 0


class Reserved(NodeMessage, frozen=True, array_like=True):
    ticket: Ticket

    @property
    def request(self) -> str:
        return self.ticket.request

    @property
    def attempt(self) -> int:
        return self.ticket.attempt


class Refused(NodeMessage, frozen=True, array_like=True):
    """Not accepted, nothing is held for it. `leg` says which message is answered, attempt is that message's (for
    deliver, the ticket's; sent also when the ticket broke later: the KV stays parked). retryable False: no node of this
    size can ever take it. param: what of the work is at fault, "" for nothing in particular."""

    request: Id
    attempt: Count
    leg: RefusedLeg
    reason: Text
    retry_after_s: Seconds
    retryable: bool = True
    param: Text = ""


class Tokens(NodeMessage, frozen=True, array_like=True):
    """One frame per step and router with every row's new tokens."""

    rows: tuple[TokenRow, ...]


class Delivered(NodeMessage, frozen=True, array_like=True):
    """The decode node acknowledged the commit; the prefill leg is over."""

    request: Id
    attempt: Count
    timings: LegTimings


class Finished(NodeMessage, frozen=True, array_like=True):
    """The attempt ended well; its last tokens came before this message. num_output: output tokens of the whole request,
    so that the router knows when it has them all. stop_token: the id that ended it, if one did."""

    request: Id
    attempt: Count
    reason: FinishReason
    num_output: Count
    timings: LegTimings
    stop_token: Count | None = None


class Embedded(NodeMessage, frozen=True, array_like=True):
    """The answer to a Prefill with pooling; it ends the attempt. vector: packed little-endian float32, all finite."""

    request: Id
    attempt: Count
    vector: Annotated[bytes, msgspec.Meta(min_length=4, max_length=MAX_VECTOR_BYTES)]
    timings: LegTimings


class Failed(NodeMessage, frozen=True, array_like=True):
    """The attempt ended badly on this node. code is that of an error in `errors`; retryable: another node may succeed.
    param: as in Refused."""

    request: Id
    attempt: Count
    code: Id
    message: Text
    retryable: bool
    param: Text = ""


class Load(NodeMessage, frozen=True, array_like=True):
    """What a node has to do, sent when it changed, at most every report interval. Pages count the KV pool: free, cached
    (evictable), quarantined (a writer may still write), the rest in use. Counted beside: pinned ones, which a write
    reads, and parked ones, which hold finished KV that no decode node has taken yet. slots: rows the running batch may
    have, slots_used those taken.

    waiting_tokens: prompt tokens that are not computed and were not found in the cache, of waiting and of running
    requests; waiting_pairs: the attention pairs they make (`cost.num_pairs`). rows: those of the running batch and of
    reservations that decode here or will, so no remote prefills; context_tokens: KV that they attend to. cost: None
    until the node has one. itl_s: between two tokens of its rows lately, whatever shared their steps; 0 before any.
    paths: to the decode nodes written to last. failed_writes, resent_chunks, pulls: how many since the node started, by
    reason or result. draining: no new work, for now or for good. role: None: the card's. seen: number of the last frame
    from the router that gets the report; what came in it and before is counted. stuck: its engine makes no progress, so
    it takes no work until it does. batch_tokens: prompt tokens to compute of batch requests, which give way: they
    are not among waiting_tokens and waiting_pairs. batch_rows: of rows, those of batch requests."""

    waiting: BigCount
    running: BigCount
    waiting_tokens: BigCount
    context_tokens: BigCount
    pages_total: BigCount
    pages_free: BigCount
    pages_cached: BigCount
    pages_quarantined: BigCount
    pages_pinned: BigCount
    slots: BigCount
    slots_used: BigCount
    pages_parked: BigCount = 0
    draining: bool = False
    steps: BigCount = 0
    waiting_pairs: BigCount = 0
    rows: BigCount = 0
    cost: CostReport | None = None
    paths: Annotated[tuple[PathLoad, ...], msgspec.Meta(max_length=MAX_PATHS)] = ()
    failed_writes: Reasons = ()
    resent_chunks: Reasons = ()
    role: Role | None = None
    seen: BigCount = 0
    itl_s: Seconds = 0.0
    pulls: Reasons = ()
    stuck: bool = False
    batch_tokens: BigCount = 0
    batch_rows: BigCount = 0

    def pages_by_state(self) -> dict[str, int]:
        """Pages by state. Pinned and parked pages also count as used, cached or free."""
        return {
            "free": self.pages_free,
            "cached": self.pages_cached,
            "quarantined": self.pages_quarantined,
            "pinned": self.pages_pinned,
            "parked": self.pages_parked,
            "used": self.pages_total - self.pages_free - self.pages_cached - self.pages_quarantined,
        }


class CacheDelta(NodeMessage, frozen=True, array_like=True):
    """Block hashes that became cached or were evicted, HASH_BYTES each; `snapshot` replaces all that was known."""

    sequence: BigCount
    snapshot: bool
    added: bytes
    removed: bytes


class Managed(NodeMessage, frozen=True, array_like=True):
    """Answer to Manage: how it is now. num_moved: requests, and finished prompts that waited, that were ended."""

    number: BigCount
    role: Role
    cordoned: bool
    num_moved: BigCount = 0


class AdapterManaged(NodeMessage, frozen=True, array_like=True):
    """Answer to ManageAdapter. error: why it was not done, empty where it was. digest: of the files that are loaded."""

    number: BigCount
    error: Text = ""
    digest: Text = ""


class WeightsManaged(NodeMessage, frozen=True, array_like=True):
    """Answer to what is asked of weights. error: why it was not done, empty where it was. prepared: the version that
    is ready to be switched to; None: none is. target: where weights may be written, as ReceiveWeights asks for."""

    number: BigCount
    error: Text = ""
    prepared: WeightsVersion | None = None
    target: WeightsTarget | None = None


class FileChunk(NodeMessage, frozen=True, array_like=True):
    """total_bytes 0 means that the node has no such file."""

    name: Id
    offset: BigCount
    total_bytes: BigCount
    data: bytes


# ---------------------------------------------------------------- node ↔ node


class ChunkEntry(Value, frozen=True, array_like=True):
    """One chunk as its writer describes it: which tokens of which layers, how many payload bytes, their digest (0 with
    digests off), and which try of it was the last."""

    index: Count
    first_token: Count
    num_tokens: Positive
    first_layer: Count
    num_layers: Positive
    nbytes: Number
    digest: Unsigned
    trial: Count = 0


class Leg(Value, frozen=True, array_like=True):
    """What one rank of the writer wrote to one rank of the reader: the KV of heads [first_head, first_head +
    num_heads), counted over the model."""

    rank: Rank
    reader_rank: Rank
    first_head: Count
    num_heads: Positive
    chunks: Annotated[tuple[ChunkEntry, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class Commit(NodeMessage, frozen=True, array_like=True):
    """The writer's last word on a ticket, sent only when every write under it is done or definitively failed and
    resent. round: 0, then one more after each CommitAck.resend, so that a late duplicate of an older round decides
    nothing. block_tokens: in the order of the wire, so many tokens follow each other before the next layer, plane or
    head (transfer.layout.geometry). first_token: None when the KV was pulled, because nothing was sampled then, and
    where the reader makes it.

    opaque: where the KV is, in the words of the engines' own connector, for a reader that fetches it itself; empty
    where it was written. holds_s: for how long the writer keeps that KV for this ticket."""

    nonce: Unsigned
    block_tokens: Positive
    legs: Annotated[tuple[Leg, ...], msgspec.Meta(max_length=2 * MAX_RANKS)]
    first_token: Count | None
    first_logprobs: TokenLogprobs | None = None
    round: Count = 0
    opaque: Annotated[bytes, msgspec.Meta(max_length=MAX_OPAQUE_BYTES)] = b""
    holds_s: Seconds = 0.0


class CommitAck(NodeMessage, frozen=True, array_like=True):
    """resend: chunk indexes that did not verify and may be written again under the same ticket; empty means accepted.
    refused: the ticket is dead at the reader (a new attempt is needed). round: that of the Commit it answers."""

    nonce: Unsigned
    resend: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    refused: Text = ""
    round: Count = 0


class Abort(NodeMessage, frozen=True, array_like=True):
    """Stop writing under this ticket and say when no write can land any more. Also for tickets the writer has not seen
    yet. remaining_s: how long the writer must remember a ticket that it does not know (a tombstone)."""

    nonce: Unsigned
    reason: Text
    remaining_s: SecondsLeft


class AbortAck(NodeMessage, frozen=True, array_like=True):
    """Nothing can land under this ticket any more, except by media in `lost`: these need their own fence. Also sent
    unasked: the writer gave up."""

    nonce: Unsigned
    reason: Text
    lost: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_REASONS)] = ()


class Fetch(NodeMessage, frozen=True, array_like=True):
    """Write cached KV under this ticket, whose writer you are: that of the tokens that these block hashes name, from
    the prompt's first on. Answered by the ticket's protocol (writes and Commit, or AbortAck), or by Declined."""

    ticket: Ticket
    hashes: bytes


class Declined(NodeMessage, frozen=True, array_like=True):
    """The holder will not write under that ticket, or gave up when it had begun to. No proof of anything: the reader
    still aborts it."""

    nonce: Unsigned
    reason: Text
    gave_up: bool = False


class FetchWeights(NodeMessage, frozen=True, array_like=True):
    """Say which tensors you have of that version; a digest of "" is any. Answered by WeightsOffer or WeightsDeclined.
    nonce names the exchange."""

    nonce: Unsigned
    version: WeightsVersion


class WeightsOffer(NodeMessage, frozen=True, array_like=True):
    """These tensors are here. Nothing is held for it."""

    nonce: Unsigned
    tensors: WeightTensors


class TakeWeights(NodeMessage, frozen=True, array_like=True):
    """Write the tensors that you offered, in their order. Answered by WeightsWritten or WeightsDeclined. target.nonce
    names the exchange."""

    version: WeightsVersion
    target: WeightsTarget


class WeightsWritten(NodeMessage, frozen=True, array_like=True):
    """All bytes are written; these are the digests of the tensors."""

    nonce: Unsigned
    digests: TensorDigests


class WeightsDeclined(NodeMessage, frozen=True, array_like=True):
    """The holder does not have that version, or gave up."""

    nonce: Unsigned
    reason: Text


AnyMessage = (
    Hello | Ping | Prefill | Reserve | Deliver | Cancel | Release | Manage | ManageAdapter
    | PrepareWeights | ReceiveWeights | CommitWeights | SwitchWeights | SleepNode | DropWeights | ShareWeights
    | AskCache | FetchFile
    | Welcome | Scheduled | Computed | Reserved | Refused | Tokens | Delivered | Finished | Embedded | Failed | Load
    | CacheDelta | Managed | AdapterManaged | WeightsManaged | FileChunk
    | Commit | CommitAck | Abort | AbortAck | Fetch | Declined
    | FetchWeights | WeightsOffer | TakeWeights | WeightsWritten | WeightsDeclined
)  # fmt: skip

WeightsOrder = PrepareWeights | ReceiveWeights | CommitWeights | SwitchWeights | SleepNode | DropWeights | ShareWeights

# In one frame.
MAX_MESSAGES = 1024


class Envelope(Value, frozen=True, array_like=True):
    """What a frame carries: what was said, in order. sequence counts the frames of this sender's incarnation on this
    link from 1. to_incarnation: the boot the sender means, "" while it does not know it (only Hello may be sent so)."""

    protocol: int
    sender: Id
    incarnation: Id
    to_incarnation: str
    sequence: Number
    messages: Annotated[tuple[AnyMessage, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


PROTOCOL_VERSION = 6
