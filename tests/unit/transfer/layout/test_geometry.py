"""Runs between nodes of different pages and ranks: bytes that they scatter equal what tensors say, whatever the
shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster.transfer.layout.geometry import (
    Contiguity,
    PageShape,
    Part,
    are_pieces,
    common_block,
    join_runs,
    join_runs_in_parts,
    join_spans,
    offsets,
    part_bytes,
    piece_of,
    plan_courses,
)
from pdcluster.transfer.layout.runs import span_table

SIZES = [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (4, 4), (1, 4)]


@dataclass(frozen=True)
class Case:
    """One ticket between two nodes. latent: one head and one plane that every rank holds."""

    writer: PageShape
    reader: PageShape
    num_tokens: int
    cached_blocks: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    latent = draw(st.booleans())
    heads, planes = (1, 1) if latent else (draw(st.sampled_from([1, 2, 4, 8])), 2)
    small = draw(st.sampled_from([1, 2, 4, 16]))
    sizes = [small, small * draw(st.sampled_from([1, 2, 4, 3]))]
    if draw(st.booleans()):
        sizes.reverse()
    shape = PageShape(sizes[0], draw(st.integers(1, 4)), planes, heads, draw(st.sampled_from([2, 4, 6])))
    ranks = st.sampled_from([1, 2, 4])
    writer, reader = replace(shape, ranks=draw(ranks)), replace(shape, page_tokens=sizes[1], ranks=draw(ranks))
    return Case(writer, reader, draw(st.integers(1, 70)), draw(st.integers(0, 3)), draw(st.integers(0, 1000)))


def pool(shape: PageShape, num_pages: int, fill: int | None, rng: np.random.Generator) -> list[np.ndarray]:
    """Bytes of each rank, as [page][layer][plane][head][token][cell]."""
    size = (num_pages, shape.num_layers, shape.planes, shape.rank_heads, shape.page_tokens, shape.cell_bytes)
    return [
        rng.integers(0, 256, size, dtype=np.uint8) if fill is None else np.full(size, fill, np.uint8)
        for _ in range(shape.ranks)
    ]


def whole(shape: PageShape, ranks: list[np.ndarray], pages: np.ndarray) -> np.ndarray:
    """[layer][plane][head][token][cell] of all heads, over the tokens of these pages."""
    heads = {
        head: (rank, head - shape.heads_of(rank)[0])
        for rank in range(shape.ranks)
        for head in range(*shape.heads_of(rank))
    }
    out = [ranks[rank][pages, :, :, local] for rank, local in (heads[head] for head in range(shape.heads))]
    return (
        np.stack(out, axis=3)
        .transpose(1, 2, 3, 0, 4, 5)
        .reshape(shape.num_layers, shape.planes, shape.heads, -1, shape.cell_bytes)
    )


@given(cases())
@settings(max_examples=150, deadline=None)
def test_what_runs_scatter_is_what_tensors_say(case: Case) -> None:
    writer, reader, rng = case.writer, case.reader, np.random.default_rng(case.seed)
    block = common_block(writer, reader.page_tokens)
    end_block = -(-case.num_tokens // block)
    first_block = min(case.cached_blocks * (reader.page_tokens // block), end_block - 1)
    counts = [-(-case.num_tokens // shape.page_tokens) for shape in (writer, reader)]
    source_pages, target_pages = (rng.permutation(count + 3)[:count] for count in counts)
    source, target = pool(writer, counts[0] + 3, None, rng), pool(reader, counts[1] + 3, 0, rng)
    if writer.ranks > writer.heads:  # copies of a head are equal on all ranks that hold it
        by_head = {writer.heads_of(rank): source[rank] for rank in range(writer.ranks)}
        source = [by_head[writer.heads_of(rank)] for rank in range(writer.ranks)]
    moved = 0
    for course in plan_courses(writer.heads, writer.ranks, reader.ranks):
        middle = writer.num_layers // 2
        for layers in ((0, middle), (middle, writer.num_layers)):
            if layers[0] == layers[1]:
                continue
            part = Part(block, first_block, end_block, *layers, course.first_head, course.end_head)
            piece = min(piece_of(writer, course.writer_rank, part), piece_of(reader, course.reader_rank, part))
            first = first_block * block // writer.page_tokens
            starts, nbytes = offsets(writer, course.writer_rank, source_pages[first:].tolist(), first, part, piece)
            ends, same = offsets(reader, course.reader_rank, target_pages.tolist(), 0, part, piece)
            assert nbytes == same and nbytes >= block * writer.cell_bytes
            runs = join_runs(starts, ends, nbytes)
            assert sum(run.nbytes for run in runs) == part_bytes(writer, part) == part_bytes(reader, part)
            out, into = source[course.writer_rank].reshape(-1), target[course.reader_rank].reshape(-1)
            for run in runs:
                into[run.target : run.target + run.nbytes] = out[run.source : run.source + run.nbytes]
            moved += part_bytes(writer, part)
            own = join_spans(
                *offsets(
                    reader,
                    course.reader_rank,
                    target_pages.tolist(),
                    0,
                    part,
                    piece_of(reader, course.reader_rank, part),
                )
            )
            wire = b"".join(out[run.source : run.source + run.nbytes].tobytes() for run in runs)
            assert b"".join(into[start : start + count].tobytes() for start, count in own) == wire, (
                "both ends walk the wire's order"
            )
    span = slice(first_block * block, end_block * block)
    sent = whole(writer, source, source_pages)[:, :, :, span]
    for rank in range(reader.ranks):
        held = replace(reader, ranks=1, heads=reader.rank_heads)
        first_head, end_head = reader.heads_of(rank)
        np.testing.assert_array_equal(
            whole(held, [target[rank]], target_pages)[:, :, :, span], sent[:, :, first_head:end_head]
        )
        assert not np.delete(target[rank], target_pages, axis=0).any(), "a page of somebody else was written"
    assert moved == sent[:, :, 0].nbytes * reader.rank_heads * reader.ranks, "nothing is sent twice to a rank"


@pytest.mark.parametrize(("writers", "readers"), SIZES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_every_rank_gets_each_of_its_heads_once(heads: int, writers: int, readers: int) -> None:
    shape = PageShape(16, 1, 2, heads, 4)
    got: list[tuple[int, int]] = []
    for course in plan_courses(heads, writers, readers):
        first, end = replace(shape, ranks=writers).heads_of(course.writer_rank)
        assert first <= course.first_head < course.end_head <= end
        got += [(course.reader_rank, head) for head in range(course.first_head, course.end_head)]
    wanted = [(rank, head) for rank in range(readers) for head in range(*replace(shape, ranks=readers).heads_of(rank))]
    assert sorted(got) == sorted(wanted)


def test_only_one_copy_of_a_shared_latent_is_sent_and_the_copies_share_the_work() -> None:
    assert [course.writer_rank for course in plan_courses(1, 4, 1)] == [0]
    assert [course.writer_rank for course in plan_courses(1, 4, 4)] == [0, 1, 2, 3]


def test_equal_layouts_move_whole_pages() -> None:
    shape = PageShape(16, 3, 2, 4, 8)
    part = Part(16, 0, 3, 0, 3, 0, 4)
    assert piece_of(shape, 0, part) is Contiguity.LAYERS
    starts, nbytes = offsets(shape, 0, [4, 5, 9], 0, part, Contiguity.LAYERS)
    assert nbytes == shape.page_bytes and [run.nbytes for run in join_runs(starts, starts, nbytes)] == [
        2 * nbytes,
        nbytes,
    ]
    assert join_spans(starts, nbytes) == [(4 * nbytes, 2 * nbytes), (9 * nbytes, nbytes)]


def test_a_head_range_of_equal_pages_is_one_run_per_layer_and_plane() -> None:
    part = Part(16, 0, 1, 0, 3, 2, 4)
    assert piece_of(PageShape(16, 3, 2, 4, 8), 0, part) is Contiguity.HEADS
    assert piece_of(PageShape(16, 3, 2, 4, 8, ranks=2), 1, part) is Contiguity.LAYERS
    starts, nbytes = offsets(PageShape(16, 3, 2, 4, 8), 0, [0], 0, part, Contiguity.HEADS)
    assert len(starts) == 6 and nbytes == 2 * 16 * 8


def test_a_part_of_a_page_is_one_run_per_head_and_never_one_per_token() -> None:
    part = Part(16, 1, 2, 0, 3, 0, 4)
    starts, nbytes = offsets(PageShape(64, 3, 2, 4, 8), 0, [7], 0, part, piece_of(PageShape(64, 3, 2, 4, 8), 0, part))
    assert len(starts) == 3 * 2 * 4 and nbytes == 16 * 8


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30), st.integers(1, 12))
def test_runs_in_parts_are_those_that_a_loop_joins(places: list[tuple[int, int]], part_pieces: int) -> None:
    size = 4
    sources, targets = (np.array(column, dtype=np.int64) * size for column in zip(*places, strict=True))
    wanted: list[list[tuple[int, int, int]]] = []
    for index, (source, target) in enumerate(places):
        if index % part_pieces == 0:
            wanted.append([])
        last = wanted[-1][-1] if wanted[-1] else None
        if last is not None and last[0] + last[2] == source * size and last[1] + last[2] == target * size:
            wanted[-1][-1] = (last[0], last[1], last[2] + size)
        else:
            wanted[-1].append((source * size, target * size, size))
    ends = [*range(part_pieces, len(places), part_pieces), len(places)]
    parts = join_runs_in_parts(sources, targets, size, ends)
    assert [[(run.source, run.target, run.nbytes) for run in part] for part in parts] == wanted


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 3), min_size=12, max_size=12),
    st.data(),
)
def test_spans_are_the_pieces_however_they_are_cut_and_nothing_else_is(
    places: list[int], cuts: list[int], data: st.DataObject
) -> None:
    size = 4
    starts = np.array(places, dtype=np.int64) * size
    finer = [
        (place * size + at, cut if at + cut < size else size - at)
        for place, cut in zip(places, cuts, strict=False)
        for at in range(0, size, cut)
    ]
    spans = data.draw(
        st.sampled_from([[(place * size, size) for place in places], finer, list(join_spans(starts, size))])
    )
    assert are_pieces(span_table(spans), starts, size)
    index, moved = (
        data.draw(st.integers(0, len(spans) - 1)),
        data.draw(st.sampled_from([(1, 0), (0, 1), (0, -1), (-size, 0), (0, -100)])),
    )
    wrong = [*spans[:index], (spans[index][0] + moved[0], spans[index][1] + moved[1]), *spans[index + 1 :]]
    assert not are_pieces(span_table(wrong), starts, size) and not are_pieces(span_table(spans[:-1]), starts, size)
