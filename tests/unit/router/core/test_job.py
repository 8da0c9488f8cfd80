"""One request over its attempts: what is packed and hashed once, and what counts as cached."""

from __future__ import annotations

from array import array

from pdcluster.core.messages import HASH_BYTES, Sampling, pack_tokens
from pdcluster.kv.hashing import block_hashes, chain_root
from pdcluster_router.core.job import HashChain, HashedPrompt, Job

ROOT = chain_root(block_tokens=4, salt=b"")


def make_job(num_tokens: int = 10) -> Job:
    return Job("r1", array("i", range(num_tokens)), Sampling(max_tokens=8, seed=1), 100.0, HashChain(ROOT, 4))


def test_a_prompt_is_packed_once_however_many_nodes_are_asked() -> None:
    job = make_job()
    first = job.work(0, 0.0, 0)
    job.hashes_so_far()
    assert job.work(1, 5.0, 0).token_ids is first.token_ids and job.work(1, 5.0, 0).hashes is first.hashes
    assert job.work(1, 5.0, 0).deadline_s == 95.0, "what does change is new"


def test_work_after_some_tokens_holds_the_prompt_and_as_many_of_them_as_asked() -> None:
    job = make_job()
    job.work(0, 0.0, 0)
    job.emitted += [70, 71, 72]
    whole = [*range(10), 70, 71, 72]
    assert job.work(1, 0.0, 3).token_ids == pack_tokens(whole)
    assert job.work(1, 0.0, 0).token_ids == pack_tokens(range(10))
    assert job.work(1, 0.0, 3).hashes == block_hashes(pack_tokens(whole), block_tokens=4)
    assert len(job.work(1, 0.0, 0).hashes) == 2 * HASH_BYTES
    job.emitted += [73]
    assert job.work(2, 0.0, 4).token_ids == pack_tokens([*whole, 73])


def test_what_a_later_attempt_finds_cached_was_computed_for_this_request_and_does_not_count() -> None:
    job = make_job()
    job.note_cached(4)
    job.note_cached(10)  # no token was emitted yet, but the first attempt computed the prompt
    assert job.cached_tokens == 4
    late = make_job()
    late.note_cached(99)
    assert late.cached_tokens == 10, "never more than the prompt"


def test_choices_of_one_prompt_have_its_packed_tokens_and_hashes_in_common() -> None:
    named, prompt, chain = HashedPrompt(), array("i", range(10)), HashChain(ROOT, 4)
    packed, hashes = named.of(prompt, chain)
    assert packed == pack_tokens(prompt) and hashes == block_hashes(packed, block_tokens=4)
    again = named.of(prompt, HashChain(ROOT, 4))
    assert again[0] is packed and again[1] is hashes


def test_another_prompt_or_another_tenant_has_names_of_its_own() -> None:
    named, prompt = HashedPrompt(), array("i", range(10))
    _, hashes = named.of(prompt, HashChain(ROOT, 4))
    other = chain_root(block_tokens=4, salt=b"other")
    assert named.of(prompt, HashChain(other, 4))[1] == block_hashes(prompt, block_tokens=4, salt=b"other") != hashes
    longer = array("i", range(12))
    assert named.of(longer, HashChain(other, 4))[1] == block_hashes(longer, block_tokens=4, salt=b"other")
