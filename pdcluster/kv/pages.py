"""Who holds which KV page: owners, writers, and the prefix cache. Pure bookkeeping of ids; the tensors are in
`kv.pool`.

A page is in exactly one of four states, which follow from three facts about it:

    state        owners   writer   published   meaning
    free         0        no       no          on the free list
    used         ≥ 1      any      any         a sequence, or a transfer that reads it, holds it
    cached       0        no       yes         kept for its contents, evicted when pages run short
    quarantined  0        yes      no          nobody needs it, but a remote writer may still write to it: never reused

Published pages form a tree: a page's parent holds the tokens before it, and it is the page's hash chain that names it.
Requirements:
 1. Prefix closure: the parent of a published page is published. So holdings are found by bisection, and the router's
    index may rely on it.
 2. Only leaves are evicted, the longest unused first.
 3. A published page is never written to: it has no writer, and who wants to write allocates.
 4. A page whose contents are not believed any more is forgotten with all that was computed behind it; whoever holds it
    keeps it, unpublished.

Requirement 2 in O(1): a page is *busy* while it has owners or a busy child, else idle; idle pages sit in a list in the
order in which they turned idle. A page cannot turn idle before its children, and when a child turns busy so does its
parent. Hence children stand before their parents in the list, and its head is always a leaf, the least recently used of
all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from pdcluster.core.errors import ConfigError, IntegrityError
from pdcluster.core.messages import HASH_BYTES
from pdcluster.kv.hash_changes import HashChanges, split_hashes

Hashes = bytes | bytearray


class PagePool:
    """All pages of a node. Owned by one thread. Every call keeps the invariants, or raises and changes nothing."""

    def __init__(self, num_pages: int, page_tokens: int, block_tokens: int) -> None:
        if num_pages < 1:
            raise ConfigError(
                f"the KV pool has {num_pages} pages, it needs at least 1; give it more memory or use smaller pages"
            )
        if page_tokens < 1 or block_tokens < 1 or page_tokens % block_tokens:
            raise ConfigError(
                f"page size {page_tokens} is no multiple of the hash block of {block_tokens} tokens; use such a "
                "multiple"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.block_tokens = block_tokens
        self._page_hash_bytes = page_tokens // block_tokens * HASH_BYTES
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._writer: list[int | None] = [None] * num_pages
        # The block hashes of a published page. The last one is the page's key.
        self._hashes = [b""] * num_pages
        self._parent: list[int | None] = [None] * num_pages
        self._depth = [0] * num_pages
        self._busy_children = [0] * num_pages
        self._published: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages_of_writer: dict[int, tuple[int, ...]] = {}
        self._num_used = 0
        self._num_quarantined = 0
        self._changes = HashChanges()

    # ------------------------------------------------------------ counts

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_cached(self) -> int:
        return self.num_pages - len(self._free) - self._num_used - self._num_quarantined

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones with no busy page below them."""
        return len(self._free) + len(self._idle)

    @property
    def num_writers(self) -> int:
        return len(self._pages_of_writer)

    def num_owners(self, page: int) -> int:
        return self._owners[page]

    def writer_of(self, page: int) -> int | None:
        """The nonce whose holder may write to the page."""
        return self._writer[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens tokens."""
        return -(-num_tokens // self.page_tokens)

    # ------------------------------------------------------------ owners

    def allocate(self, count: int) -> list[int] | None:
        """`count` private pages with one owner each, evicting cached ones as needed. None, without changes, when there
        are too few.
        """
        if count > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        self._num_used += count
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add an owner to each of these used or cached pages. A prefix is acquired first page first."""
        pages = list(pages)
        for page in pages:
            if not self._owners[page] and not self._hashes[page]:
                raise IntegrityError(f"page {page} cannot be acquired: it is {self._state(page)}")
        for page in pages:
            self._owners[page] += 1
            if self._owners[page] == 1:
                self._num_used += 1
                if not self._busy_children[page]:
                    self._turn_busy(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each page. Without owners, a page is cached if published, quarantined while it has a
        writer, else free.
        """
        for page, times in Counter(pages).items():
            if self._owners[page] < times:
                raise IntegrityError(
                    f"page {page} is released {times} times, but has {self._owners[page]} owners and is "
                    f"{self._state(page)}"
                )
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._num_used -= 1
                self._settle(page)

    def make_private(self, page: int) -> int | None:
        """The page that an owner of `page` may write to once it holds the same contents (copy on write).

        It is `page` itself where it has one owner and is not published, else a fresh page. None, without changes, when
        there is none. The owner keeps `page` and releases it after the copy.
        """
        if not self._owners[page]:
            raise IntegrityError(f"page {page} cannot be made private: it is {self._state(page)}")
        if self._owners[page] == 1 and not self._hashes[page] and self._writer[page] is None:
            return page
        fresh = self.allocate(1)
        return None if fresh is None else fresh[0]

    def _settle(self, page: int) -> None:
        """Move a page without owners to its state."""
        if self._writer[page] is not None:
            self._num_quarantined += 1
        elif not self._hashes[page]:
            self._free.append(page)
        elif not self._busy_children[page]:
            self._turn_idle(page)

    # ------------------------------------------------------------ writers

    def attach_writer(self, pages: Iterable[int], nonce: int) -> None:
        """The holder of `nonce` may write to these private pages until `detach_writer`. No page is reused before
        that.
        """
        attached = tuple(pages)
        if nonce in self._pages_of_writer:
            raise IntegrityError(f"writer {nonce:#x} is attached already")
        for page in attached:
            if self._owners[page] != 1 or self._hashes[page] or self._writer[page] is not None:
                raise IntegrityError(
                    f"page {page} cannot take writer {nonce:#x}: it is {self._state(page)} with {self._owners[page]} "
                    "owners"
                )
        for page in attached:
            self._writer[page] = nonce
        self._pages_of_writer[nonce] = attached

    def detach_writer(self, nonce: int) -> None:
        """The holder of `nonce` can write no more: its commit was verified, or there is proof. Its quarantined pages
        become free.
        """
        if nonce not in self._pages_of_writer:
            raise IntegrityError(f"writer {nonce:#x} is not attached")
        for page in self._pages_of_writer.pop(nonce):
            self._writer[page] = None
            if not self._owners[page]:
                self._num_quarantined -= 1
                self._settle(page)

    # ------------------------------------------------------------ the prefix cache

    def match_length(self, hashes: Hashes, max_pages: int | None = None) -> int:
        """Pages of the longest published prefix of a hash chain, at most `max_pages`. Looks at log2 of them
        (requirement 1).
        """
        low, high = 0, len(hashes) // self._page_hash_bytes
        if max_pages is not None:
            high = min(high, max_pages)
        while low < high:
            middle = (low + high + 1) // 2
            if self._lookup(hashes, middle) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def match(self, hashes: Hashes, max_pages: int | None = None) -> list[int]:
        """The longest published prefix of a hash chain, first page first. Acquires nothing."""
        length = self.match_length(hashes, max_pages)
        page = self._lookup(hashes, length) if length else None
        pages = []
        while page is not None:
            pages.append(page)
            page = self._parent[page]
        pages.reverse()
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages `allocate` could evict now. Acquiring them makes so many fewer available."""
        return sum(page in self._idle for page in pages)

    def publish(self, page: int, hashes: bytes, parent: bytes | None) -> int:
        """Publish a filled page, and return the page that holds its contents from now on.

        hashes: of its blocks.
        parent: the hash before them, None for a first page. If a page with the same contents was published earlier, it
        stays: ownership moves to it, and it is returned. Publishing again changes nothing.
        """
        self._check_publishable(page, hashes)
        known = self._published.get(hashes[-HASH_BYTES:])
        if known == page:
            return page
        if known is not None:
            self.acquire((known,))
            self.release((page,))
            return known
        above = None if parent is None else self._published.get(parent)
        if parent is not None and (above is None or not self._owners[above]):
            raise IntegrityError(
                f"page {page} is published under {parent.hex()}, whose page is "
                f"{'unknown' if above is None else self._state(above)}"
            )
        self._hashes[page] = hashes
        self._published[hashes[-HASH_BYTES:]] = page
        self._parent[page] = above
        self._depth[page] = 1
        if above is not None:
            self._depth[page] += self._depth[above]
            self._busy_children[above] += 1
        self._changes.add(hashes)
        return page

    def is_published(self, page: int) -> bool:
        return bool(self._hashes[page])

    def forget(self, pages: Iterable[int]) -> None:
        """Unpublish these pages and all below them (requirement 4). Looks at every page; rare."""
        doomed = set(pages)
        found: list[int] = []
        for page in sorted((page for page, hashes in enumerate(self._hashes) if hashes), key=self._depth.__getitem__):
            if page in doomed or self._parent[page] in doomed:
                doomed.add(page)
                found.append(page)
        for page in reversed(found):
            self._forget_leaf(page)

    def _check_publishable(self, page: int, hashes: bytes) -> None:
        if len(hashes) != self._page_hash_bytes:
            raise IntegrityError(
                f"page {page} is published with {len(hashes)} bytes of hashes; its blocks have {self._page_hash_bytes}"
            )
        if not self._owners[page]:
            raise IntegrityError(f"page {page} is published, but it is {self._state(page)}")
        writer = self._writer[page]
        if writer is not None:
            raise IntegrityError(
                f"page {page} is published while writer {writer:#x} may still write to it; detach the writer first"
            )
        if self._hashes[page] and self._hashes[page] != hashes:
            raise IntegrityError(
                f"page {page} is published as {hashes.hex()}, but it is {self._hashes[page].hex()} already"
            )

    def drain_changes(self) -> tuple[bytes, bytes]:
        """Block hashes (added, removed) since the last call, HASH_BYTES each. What came and went in between is in
        neither.
        """
        return self._changes.drain()

    def snapshot(self) -> bytes:
        """Every published block hash, HASH_BYTES each."""
        return b"".join(self._changes.present)

    # ------------------------------------------------------------ inside

    def _lookup(self, hashes: Hashes, depth: int) -> int | None:
        """The page published under the hash that ends page `depth` (from 1) of the chain. The depth is checked, because
        a chain comes from a peer.
        """
        end = depth * self._page_hash_bytes
        page = self._published.get(bytes(hashes[end - HASH_BYTES : end]))
        return page if page is not None and self._depth[page] == depth else None

    def _turn_busy(self, page: int) -> None:
        """An idle page got its first owner. It and its idle ancestors leave the list."""
        above: int | None = page
        while above is not None:
            page = above
            del self._idle[page]
            above = self._parent[page]
            if above is not None:
                self._busy_children[above] += 1
                if self._owners[above] or self._busy_children[above] > 1:
                    return

    def _turn_idle(self, page: int) -> None:
        """A published page lost its last owner and has no busy child. It and the ancestors that it alone kept busy
        enter the list, child first.
        """
        above: int | None = page
        while above is not None:
            page = above
            self._idle[page] = None
            above = self._parent[page]
            if above is not None:
                self._busy_children[above] -= 1
                if self._owners[above] or self._busy_children[above]:
                    return

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unpublish(page)
        return page

    def _forget_leaf(self, page: int) -> None:
        above, is_busy = self._parent[page], self._is_busy(page)
        self._unpublish(page)
        self._idle.pop(page, None)
        if not self._owners[page]:
            self._free.append(page)
        if is_busy and above is not None:
            self._busy_children[above] -= 1
            if not self._is_busy(above):
                self._turn_idle(above)

    def _unpublish(self, page: int) -> None:
        """Unpublish a page with no published page below it."""
        hashes, self._hashes[page] = self._hashes[page], b""
        del self._published[hashes[-HASH_BYTES:]]
        self._parent[page] = None
        self._depth[page] = 0
        self._changes.remove(hashes)

    def _state(self, page: int) -> str:
        if self._owners[page]:
            return "used"
        if self._writer[page] is not None:
            return "quarantined"
        return "cached" if self._hashes[page] else "free"

    # ------------------------------------------------------------ integrity

    def check_integrity(self) -> None:
        """Recount everything. Raises IntegrityError that names what does not add up."""
        states = Counter(self._state(page) for page in range(self.num_pages))
        for state, count in (
            ("free", self.num_free),
            ("used", self.num_used),
            ("cached", self.num_cached),
            ("quarantined", self.num_quarantined),
        ):
            _require(states[state] == count, f"{states[state]} pages are {state}, but {count} are counted")
        _require(len(set(self._free)) == len(self._free), "a page is on the free list twice")
        for page in self._free:
            _require(self._state(page) == "free", f"page {page} is on the free list but {self._state(page)}")
        self._check_writers()
        self._check_tree()
        self._check_idle_order()

    def _check_writers(self) -> None:
        attached = {page: nonce for nonce, pages in self._pages_of_writer.items() for page in pages}
        for page, writer in enumerate(self._writer):
            _require(
                attached.get(page) == writer,
                f"page {page} has writer {writer}, but is in the list of {attached.get(page)}",
            )
            _require(
                writer is None or not self._hashes[page], f"page {page} is published while writer {writer} is attached"
            )

    def _check_tree(self) -> None:
        busy_children: Counter[int] = Counter()
        hashes_present: Counter[bytes] = Counter()
        for page in range(self.num_pages):
            hashes, parent = self._hashes[page], self._parent[page]
            if not hashes:
                _require(
                    parent is None and not self._busy_children[page] and not self._depth[page],
                    f"unpublished page {page} is in the tree",
                )
                continue
            _require(
                self._published.get(hashes[-HASH_BYTES:]) == page, f"page {page} is published but not found by its hash"
            )
            hashes_present.update(split_hashes(hashes))
            depth_above = self._depth[parent] if parent is not None else 0
            _require(
                self._depth[page] == depth_above + 1,
                f"page {page} has depth {self._depth[page]} below depth {depth_above}",
            )
            if parent is not None:
                _require(bool(self._hashes[parent]), f"the parent {parent} of cached page {page} is not cached")
                busy_children[parent] += self._is_busy(page)
        for page, count in enumerate(self._busy_children):
            _require(
                count == busy_children[page],
                f"page {page} has {busy_children[page]} busy children, {count} are counted",
            )
        _require(len(self._published) == sum(map(bool, self._hashes)), "a hash names a page that is not published")
        _require(hashes_present == self._changes.present, "the published block hashes differ from those of the pages")

    def _check_idle_order(self) -> None:
        seen: set[int] = set()
        for page in self._idle:
            _require(
                bool(self._hashes[page]) and not self._is_busy(page),
                f"page {page} can be evicted but is {self._state(page)}",
            )
            parent = self._parent[page]
            _require(parent not in seen, f"page {page} would be evicted after its parent {parent}")
            seen.add(page)
        idle = sum(bool(self._hashes[page]) and not self._is_busy(page) for page in range(self.num_pages))
        _require(idle == len(self._idle), f"{idle} pages are idle, {len(self._idle)} are in the list")

    def _is_busy(self, page: int) -> bool:
        return self._owners[page] > 0 or self._busy_children[page] > 0


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise IntegrityError(f"KV pages: {complaint}")
