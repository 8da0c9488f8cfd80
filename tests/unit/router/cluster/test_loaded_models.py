"""Which models a router serves: text files come from nodes; faults of a node are tried again, those of the files are
told and not tried for ever. What a name means follows the nodes' cards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_files, with_config

from pdcluster.api.text.chat_template import Message
from pdcluster.bootstrap.card import Adapter, NodeCard
from pdcluster.checkpoint.text_files import files_digest
from pdcluster.core.errors import NodeLost, UnknownModel
from pdcluster.core.messages import PROTOCOL_VERSION, FileChunk, Role
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster_router.cluster import models as module
from pdcluster_router.cluster.models import ModelRegistry

WAIT_S = 20.0
FINGERPRINT = Fingerprint("tiny", "0" * 32, PROTOCOL_VERSION, 32, KVLayout(1, 1, 32, 32, "bfloat16"))


class Nodes:
    """Nodes that serve text files, and fail as often as they are told to."""

    def __init__(self, files: dict[str, bytes], *names: str) -> None:
        self.version, self.failures, self.fetched = 1, 0, 0
        self._changed = asyncio.Event()
        self._cards: list[tuple[NodeCard, bool]] = []
        # By digest; of unlinked nodes nothing can be fetched.
        self.texts: dict[str, dict[str, bytes]] = {}
        self.unlinked: set[str] = set()
        # They answer nothing.
        self.mute: set[str] = set()
        self.change(files, *names)

    @property
    def cards_version(self) -> int:
        return self.version

    @property
    def roles_version(self) -> int:
        return self.version

    def roles_taking(self) -> dict[str, set[Role]]:
        """Of nodes that stay: all of them take work."""
        found: dict[str, set[Role]] = {}
        for card, stays in self._cards:
            for digest in card.model_digests if stays else ():
                found.setdefault(digest, set()).add(card.role)
        return found

    def refusal(self) -> str | None:
        return None

    def cards(self) -> Iterable[NodeCard]:
        return [card for card, _ in self._cards if card.node not in self.unlinked]

    def known_cards(self) -> Sequence[tuple[NodeCard, bool]]:
        return self._cards

    async def wait_for_change(self, seen: int) -> None:
        while self.version == seen:
            await self._changed.wait()
            self._changed.clear()

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk:
        self.fetched += 1
        if self.failures:
            self.failures -= 1
            raise NodeLost("gone for a while")
        card = next(card for card in self.cards() if card.incarnation == incarnation)
        if card.node in self.mute:
            raise NodeLost("it says nothing")
        data = self.texts[card.tokenizer_hash].get(name, b"")
        return FileChunk(name, offset, len(data), data[offset:])

    def card(self, files: dict[str, bytes], name: str = "a", **changes: Any) -> NodeCard:
        digest = files_digest(files)
        self.texts[digest] = files
        fields: dict[str, Any] = {
            "role": "mixed", "address": f"{name}:1", "model": "tiny", "fingerprint": FINGERPRINT, "max_len": 64, "vocab_size": 420, "num_pages": 8,
            "tokenizer_hash": digest,
        }  # fmt: skip
        return NodeCard(name, f"{name}-boot", **(fields | changes))

    def change(self, files: dict[str, bytes], *names: str) -> None:
        self.become(*(self.card(files, name) for name in names))

    def become(self, *cards: NodeCard, leaving: Sequence[NodeCard] = ()) -> None:
        self._cards = [(card, card not in leaving and not card.draining) for card in cards]
        self.version += 1
        self._changed.set()


async def until(condition: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_files_that_can_never_be_read_are_told_and_not_asked_for_again() -> None:
    nodes = Nodes(byte_level_files() | {"chat_template.jinja": b"{% for m in messages %}"}, "a", "b")
    models = ModelRegistry(nodes, None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.refusal)
    assert "cannot be served" in str(models.refusal()) and "template" in str(models.refusal())
    asked = nodes.fetched
    nodes.change(next(iter(nodes.texts.values())), "a", "b")
    await asyncio.sleep(0.05)
    assert nodes.fetched == asked
    nodes.change(byte_level_files(), "a")  # nodes with other files came instead
    await until(models.models)
    assert models.refusal() is None
    loading.cancel()


async def test_a_node_that_is_lost_meanwhile_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    nodes = Nodes(byte_level_files(), "a")
    nodes.failures = 2
    models = ModelRegistry(nodes, None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    assert nodes.failures == 0 and models.refusal() is None
    loading.cancel()


async def test_one_mute_node_does_not_keep_the_text_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    nodes = Nodes(byte_level_files(), "a", "b")
    nodes.mute.add("a")
    models = ModelRegistry(nodes, None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    loading.cancel()


async def test_a_tokenizer_of_its_own_that_is_not_there_is_told(tmp_path: Path) -> None:
    models = ModelRegistry(Nodes(byte_level_files(), "a"), tmp_path / "gone")
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.refusal)
    assert "gone holds none of tokenizer.json" in str(models.refusal())
    loading.cancel()


async def test_a_tokenizer_of_its_own_whose_ends_the_model_lacks_is_told(tmp_path: Path) -> None:
    """A directory without a config.json says nothing of the model; the node's card does."""
    files = with_config(byte_level_files(), eos_token="<tool>")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    nodes = Nodes(byte_level_files(), "a")
    (card,) = nodes.cards()
    nodes.become(replace(card, vocab_size=10))
    models = ModelRegistry(nodes, tmp_path)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.refusal)
    assert "the model only has 0 to 9" in str(models.refusal())
    loading.cancel()


async def test_without_nodes_nothing_is_refused() -> None:
    assert ModelRegistry(Nodes(byte_level_files()), None).refusal() is None


async def test_named_templates_come_from_nodes() -> None:
    named = {
        "chat_template.jinja": b"default:{{ messages[0].content }}",
        "additional_chat_templates/tool_use.jinja": b"tools:{{ messages[0].content }}",
    }
    models = ModelRegistry(Nodes(byte_level_files() | named, "a"), None)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    chat = [{"role": "user", "content": "hi"}]
    text = models.text("tiny")
    assert (text.render_chat(chat), text.render_chat(chat, tools=[{}])) == ("default:hi", "tools:hi")
    loading.cancel()


# ---------------------------------------------------------------- what a name means

TEXT_A = byte_level_files()
TEXT_B = byte_level_files() | {"chat_template.jinja": b"{{ messages[0].content }} of B"}
OTHER_WEIGHTS = replace(FINGERPRINT, weights="1" * 32)
TALK: list[Message] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def following(nodes: Nodes, *cards: NodeCard) -> AsyncIterator[ModelRegistry]:
    """A registry that has loaded what these nodes serve."""
    models = ModelRegistry(nodes, None)
    nodes.become(*cards)
    loading = asyncio.create_task(models.keep_loaded())
    await until(lambda: served(models) == {name for card in cards for name in card.models})
    yield models
    loading.cancel()


def served(models: ModelRegistry) -> set[str]:
    return {info.id for info in models.models()}


def rendered(models: ModelRegistry, model: str = "tiny") -> str:
    return models.text(model).render_chat(TALK, add_generation_prompt=True)


def digest(models: ModelRegistry, model: str = "tiny") -> str:
    return next(info.digest for info in models.models() if info.id == model)


async def test_a_name_under_which_nodes_with_other_text_come_gets_their_text() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        before, old = rendered(models), digest(models)
        nodes.become()
        await asyncio.sleep(0.02)
        assert served(models) == {"tiny"} and rendered(models) == before, "its requests wait for its nodes"
        nodes.become(nodes.card(TEXT_B, "b"))
        await until(lambda: digest(models) != old)
        assert rendered(models) == "hi of B" != before


async def test_a_name_under_which_nodes_with_other_weights_come_is_another_model_of_the_same_text() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        old, root, fetched = digest(models), models.chain("tiny", b"").root, nodes.fetched
        nodes.become(nodes.card(TEXT_A, "b", fingerprint=OTHER_WEIGHTS, eos_ids=(3,)))
        await until(lambda: digest(models) != old)
        assert models.chain("tiny", b"").root != root and models.models()[0].eos_token_ids == (3,)
        assert nodes.fetched == fetched, "the text is there"


async def test_the_names_of_a_model_have_one_text() -> None:
    """By that requests need not name a model that has several names."""
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A, model_aliases=("alias",))) as models:
        assert [info.id for info in models.models()] == ["tiny", "alias"]
        assert models.text("tiny") is models.text("alias")


async def test_an_adapter_is_a_model_with_a_parent_a_hash_root_and_the_text_of_its_base() -> None:
    nodes = Nodes(TEXT_A)
    sql = Adapter("sql", "d1")
    async with following(nodes, nodes.card(TEXT_A, adapters=(sql, Adapter("sums", "d1")))) as models:
        parents = {info.id: (info.parent, info.adapter) for info in models.models()}
        assert parents == {"tiny": ("", ""), "sql": ("tiny", "sql"), "sums": ("tiny", "sums")}
        assert models.text("sql") is models.text("tiny")
        roots = {name: models.chain(name, b"").root for name in parents}
        assert len(set(roots.values())) == 3
        nodes.become(nodes.card(TEXT_A, adapters=(Adapter("sql", "d2"),)))
        await until(lambda: served(models) == {"tiny", "sql"} and models.chain("sql", b"").root != roots["sql"])
        assert models.chain("tiny", b"").root == roots["tiny"]
        nodes.become(nodes.card(TEXT_A))
        await until(lambda: served(models) == {"tiny"})
        with pytest.raises(UnknownModel):
            models.chain("sql", b"")


async def test_a_name_that_no_card_carries_is_gone_once_other_cards_are_there() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A, model_aliases=("more",))) as models:
        nodes.become(nodes.card(TEXT_B, "b", model="m2"))
        await until(lambda: served(models) == {"m2"})
        for name in ("tiny", "more"):
            with pytest.raises(UnknownModel, match="m2"):
                models.text(name)
            with pytest.raises(UnknownModel, match="m2"):
                models.chain(name, b"")


async def test_who_waits_for_the_first_model_waits_also_when_the_one_before_is_gone() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        nodes.unlinked.add("b")
        nodes.become(nodes.card(TEXT_B, "b", model="m2"))
        await until(lambda: not models.models())
        first = asyncio.create_task(models.first())
        await asyncio.sleep(0.02)
        assert not first.done()
        nodes.unlinked.clear()
        nodes.become(nodes.card(TEXT_B, "b", model="m2"))
        await first
        assert served(models) == {"m2"}


@pytest.mark.parametrize("is_listed", [True, False], ids=["it drains", "the bootstrap has forgotten it"])
async def test_a_node_on_its_way_out_replaces_no_text_with_one_more_alias(is_listed: bool) -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        leaving = nodes.card(TEXT_B, "b", model_aliases=("more",), draining=is_listed)
        before = rendered(models)
        nodes.become(nodes.card(TEXT_A), leaving, leaving=() if is_listed else (leaving,))
        await until(lambda: served(models) == {"tiny", "more"})
        assert rendered(models) == before and rendered(models, "more") == "hi of B"
        nodes.become(nodes.card(TEXT_A))
        await until(lambda: served(models) == {"tiny"})
        assert rendered(models) == before


async def test_nodes_that_take_work_give_a_name_its_meaning_before_one_that_leaves() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        nodes.become(nodes.card(TEXT_A, draining=True), nodes.card(TEXT_B, "b"))
        await until(lambda: rendered(models) == "hi of B")


async def test_a_name_keeps_its_meaning_while_nodes_disagree() -> None:
    """They are of bootstraps that know nothing of each other."""
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A, "b")) as models:
        old = digest(models)
        nodes.become(nodes.card(TEXT_B, "a"), nodes.card(TEXT_A, "b"))
        await asyncio.sleep(0.05)
        assert digest(models) == old


async def test_a_name_whose_new_text_can_never_be_read_is_gone() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        nodes.become(nodes.card(TEXT_A | {"chat_template.jinja": b"{% for m in messages %}"}, "b"))
        await until(models.refusal)
        assert not models.models() and "template" in str(models.refusal())


async def test_the_longest_request_follows_the_cards() -> None:
    nodes = Nodes(TEXT_A)
    small, large = nodes.card(TEXT_A, "s", max_len=1280), nodes.card(TEXT_A, "l", max_len=8192)
    async with following(nodes, small) as models:
        assert models.models()[0].max_len == 1280
        for cards, longest in (((small, large), 8192), ((small,), 1280), ((large,), 8192), ((), 8192)):
            nodes.become(*cards)
            await until(lambda longest=longest: models.models()[0].max_len == longest)
        created = models.models()[0].created
        nodes.become(large, replace(large, node="x", draining=True, max_len=9000))
        await until(lambda: models.models()[0].max_len == 9000)
        assert models.models()[0].created == created


async def test_a_router_with_text_of_its_own_keeps_it_for_other_weights(tmp_path: Path) -> None:
    for name, data in TEXT_B.items():
        (tmp_path / name).write_bytes(data)
    nodes = Nodes(TEXT_A, "a")
    models = ModelRegistry(nodes, tmp_path)
    loading = asyncio.create_task(models.keep_loaded())
    await until(models.models)
    old = digest(models)
    assert rendered(models) == "hi of B"
    nodes.become(nodes.card(TEXT_A, fingerprint=OTHER_WEIGHTS))
    await until(lambda: digest(models) != old)
    assert rendered(models) == "hi of B" and not nodes.fetched
    loading.cancel()


# ---------------------------------------------------------------- versions of the weights


def newer(nodes: Nodes, name: str, epoch: int = 1, **changes: Any) -> NodeCard:
    fields: dict[str, Any] = {
        "fingerprint": replace(FINGERPRINT, weights=f"{epoch}" * 32), "weights_label": f"v{epoch}",
        "weights_epoch": epoch,
    }  # fmt: skip
    return nodes.card(TEXT_A, name, **(fields | changes))


def labels(models: ModelRegistry, model: str = "tiny") -> list[str]:
    return [info.weights.label for info in models.versions(model)]


async def test_nodes_that_differ_in_weights_alone_have_versions_of_one_model() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        fetched, (base,) = nodes.fetched, models.versions("tiny")
        old, new = nodes.card(TEXT_A, model_aliases=("more",)), newer(nodes, "b", max_len=128, model_aliases=("more",))
        nodes.become(old, new)
        await until(lambda: labels(models) == labels(models, "more") == ["v1", "base"])
        assert [info.id for info in models.models()] == ["tiny", "more"] and nodes.fetched == fetched
        latest, first = models.versions("tiny")
        assert models.models()[0] == latest and (latest.max_len, first.max_len) == (128, 64)
        assert first == base and first.text == latest.text and first.digest != latest.digest
        assert (latest.weights.epoch, latest.weights.digest) == (1, "1" * 32)
        roots = [models.chain("tiny", b"", info.weights.digest).root for info in (latest, first)]
        assert roots[0] != roots[1] and models.chain("tiny", b"").root == roots[0]


async def test_a_version_that_no_card_has_is_gone_and_the_last_ones_stay_while_no_node_is_known() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        nodes.become(nodes.card(TEXT_A), newer(nodes, "b"))
        await until(lambda: labels(models) == ["v1", "base"])
        nodes.become()
        await asyncio.sleep(0.02)
        assert labels(models) == ["v1", "base"]
        nodes.become(newer(nodes, "b"), newer(nodes, "c", 2))
        await until(lambda: labels(models) == ["v2", "v1"])
        nodes.become(newer(nodes, "b"))
        await until(lambda: labels(models) == ["v1"])


async def test_a_request_gets_the_newest_version_that_is_complete() -> None:
    nodes = Nodes(TEXT_A)
    base = [nodes.card(TEXT_A, "p0", role="prefill"), nodes.card(TEXT_A, "d0", role="decode")]

    async with following(nodes, *base) as models:

        def chosen(mode: str | None = None, request: str = "r") -> str:
            return models.choose_version("tiny", request, mode).weights.label  # type: ignore[arg-type]

        assert chosen() == "base"
        nodes.become(*base, newer(nodes, "p1", role="prefill"))
        await until(lambda: len(labels(models)) == 2)
        assert chosen() == "base" and chosen("local") == "v1"
        nodes.become(*base, newer(nodes, "p1", role="prefill"), newer(nodes, "d1", role="decode"))
        await until(lambda: chosen() == "v1")
        roles = ("p1", "prefill"), ("d1", "decode")
        nodes.become(*base, *(newer(nodes, name, role=role, weights_share=30.0) for name, role in roles))
        await until(lambda: {chosen(None, f"{number}") for number in range(99)} == {"base", "v1"})
        assert abs([chosen(None, f"{number}") for number in range(2000)].count("v1") / 2000 - 0.3) < 0.05
        with pytest.raises(UnknownModel, match="tiny"):
            models.choose_version("other", "r", None)


async def test_a_card_that_says_less_bounds_what_a_canary_gets() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        nodes.become(nodes.card(TEXT_A), newer(nodes, "b", weights_share=0.0), newer(nodes, "c"))
        await until(lambda: len(labels(models)) == 2)
        assert {models.choose_version("tiny", f"{n}", None).weights.label for n in range(200)} == {"base"}


async def test_a_request_goes_on_with_the_newest_version_once_its_own_has_no_nodes() -> None:
    nodes = Nodes(TEXT_A)
    async with following(nodes, nodes.card(TEXT_A)) as models:
        (base,) = models.versions("tiny")
        assert models.successor("tiny", base.digest, None) is None
        nodes.become(nodes.card(TEXT_A), newer(nodes, "b"))
        await until(lambda: len(labels(models)) == 2)
        assert models.successor("tiny", base.digest, None) is None
        nodes.become(newer(nodes, "b"))
        await until(lambda: labels(models) == ["v1"])
        found = models.successor("tiny", base.digest, None)
        assert found is not None and found.weights.label == "v1"
        assert models.successor("unknown", base.digest, None) is None
