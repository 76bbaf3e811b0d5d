"""Validation samples and prompts with a hidden key: fixed, and valid on one rank each."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_pretrain.core.distributed import World
from ds_pretrain.core.metrics import IGNORED
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.loader import MicroBatch, read_prompt_batches, read_validation_batches
from ds_pretrain.data.validation_set import (
    DEPTHS,
    NUM_PLACES,
    SHORTEST_PROMPT,
    Prompts,
    ValidationSet,
    list_prompt_lengths,
    make_prompts,
    make_validation_set,
    score_prompts,
)
from tests.data.in_memory import SEQ_LEN, source_of


def _rounds(chosen: ValidationSet, size: int, micro_batch_size: int) -> list[list[MicroBatch]]:
    """The micro-batches of each rank."""
    return [
        list(read_validation_batches(chosen, World(rank, size, rank), micro_batch_size))
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(20, [0, 20, 40, 60, 80]), (1, [0]), (10**9, list(range(100))), (3 * SEQ_LEN, [0, 33, 66])],
    ids=["spread", "at least one", "at most all", "uneven"],
)
def test_samples_are_spread_evenly_over_the_source(tokens: int, expected: list[int]) -> None:
    assert make_validation_set("held_out", source_of(100), SEQ_LEN, tokens).indices.tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_p43_ranks_have_as_many_batches_when_nothing_divides_the_samples(
    size: int, micro_batch_size: int
) -> None:
    source = source_of(7)
    chosen = make_validation_set("held_out", source, SEQ_LEN, 7 * SEQ_LEN)
    ranks = _rounds(chosen, size, micro_batch_size)
    assert len({len(batches) for batches in ranks}) == 1
    everything = [micro for batches in ranks for micro in batches]
    assert {tuple(micro.input_ids.shape) for micro in everything} == {(micro_batch_size, SEQ_LEN)}
    valid = [
        torch.cat([ids[:1], labels]).tolist()
        for micro in everything
        for ids, labels in zip(micro.input_ids, micro.labels, strict=True)
        if (labels != IGNORED).all()
    ]
    assert sorted(valid) == sorted(source.samples(np.arange(7), SEQ_LEN).tolist())
    assert all((micro.input_ids >= 0).all() for micro in everything)
    num_labels = sum(int((micro.labels != IGNORED).sum()) for micro in everything)
    assert num_labels == 7 * SEQ_LEN  # what fills a batch up counts nowhere


def test_p09_every_pass_reads_the_same_batches() -> None:
    chosen = make_validation_set("held_out", source_of(50), SEQ_LEN, 13 * SEQ_LEN)
    first, second = (
        [
            (micro.input_ids.tolist(), micro.labels.tolist())
            for batches in _rounds(chosen, 2, 3)
            for micro in batches
        ]
        for _ in range(2)
    )
    assert first == second


TEXT_LEN, KEY, NEEDLE = 256, 8, 12


def source_of_tokens(
    tokens: Any, lengths: Sequence[int] = (), sidecar: dict[str, Any] | None = None
) -> TokenSource:
    """One document, or some of these lengths."""
    each = np.array(lengths or [len(tokens)], np.int32)
    bounds = np.arange(len(each) + 1, dtype=np.int64)
    return TokenSource(Path("memory"), tokens.astype("<i4"), each, bounds, sidecar)


def _prompts(mask_documents: bool = False) -> Prompts:
    tokens = np.random.default_rng(0).zipf(1.3, 20 * TEXT_LEN + 1) % 400
    source = source_of_tokens(tokens)
    return make_prompts(make_validation_set("web", source, TEXT_LEN, 10 * TEXT_LEN, mask_documents))


def test_a_prompt_ends_with_a_marker_and_key_that_lie_in_its_text_at_each_depth_once() -> None:
    prompts = _prompts()
    assert list(prompts.rows) == [64, 128, 256]
    for length, rows in prompts.rows.items():
        assert rows.shape == (4 * NUM_PLACES, length + 1)
        for number, row in enumerate(rows):
            needle, text = row[-NEEDLE:], row[:-NEEDLE]
            assert len(set(needle.tolist())) == NEEDLE
            found = [at for at in range(len(text) - NEEDLE + 1) if (text[at : at + NEEDLE] == needle).all()]
            room, place = length + 1 - 2 * NEEDLE, number % NUM_PLACES
            assert found == ([room * DEPTHS[place] // 100] if place < len(DEPTHS) else [])
        needles = {tuple(row[-NEEDLE:].tolist()) for row in rows}
        assert len(needles) == 4


def test_the_text_around_a_key_is_that_of_the_validation() -> None:
    prompts = _prompts()
    for rows in prompts.rows.values():
        for first in range(0, len(rows), NUM_PLACES):
            plain = rows[first + NUM_PLACES - 1]
            for place, depth in enumerate(DEPTHS):
                row = rows[first + place]
                room = len(row) - 2 * NEEDLE
                at = room * depth // 100
                without = np.concatenate([row[:at], row[at + NEEDLE : -NEEDLE]])
                assert without.tolist() == plain[:room].tolist()


def test_keys_are_of_the_rarer_tokens_of_the_text() -> None:
    prompts = _prompts()
    rows = prompts.rows[256]
    tokens, counts = np.unique(rows[NUM_PLACES - 1 :: NUM_PLACES, :-NEEDLE], return_counts=True)
    common = set(tokens[np.argsort(counts)[-20:]].tolist())
    assert not common & set(rows[:, -NEEDLE:].flatten().tolist())


EOS = 99  # the rarer half of 24 tokens are 12, and a marker with its key needs all of them


def _with_rare_separators(lengths: Sequence[int], sidecar: dict[str, Any] | None) -> Prompts:
    """Every 50th token is EOS, as rare as the tokens that keys are made of."""
    random = np.random.default_rng(0)
    tokens = [np.append(random.permutation(np.r_[np.arange(38) % 12, 12 : 12 + 11]), EOS) for _ in range(40)]
    source = source_of_tokens(np.concatenate(tokens), lengths, sidecar)
    return make_prompts(make_validation_set("web", source, 64, 1900))


@pytest.mark.parametrize(
    ("lengths", "sidecar"),
    [([50] * 40, {"eos_id": EOS}), ([50] * 40, None), ([], {"eos_id": EOS})],
    ids=["named", "by the index", "named, and no document ends"],
)
def test_no_key_holds_what_ends_a_document(lengths: list[int], sidecar: dict[str, Any] | None) -> None:
    rows = _with_rare_separators(lengths, sidecar).rows[64]
    assert {token for row in rows for token in row[-NEEDLE:].tolist()} == set(range(12, 23))


def test_what_nothing_calls_a_separator_is_a_token_as_any() -> None:
    rows = _with_rare_separators([], None).rows[64]
    assert EOS in {token for row in rows for token in row[-NEEDLE:].tolist()}


def test_the_end_of_the_last_text_ends_a_document_too() -> None:
    for length, ends in ((257, True), (258, False)):
        tokens = np.append(np.arange(length - 1) % 12, 12)
        tokens[256] = 50  # the last of the fourth text
        rows = make_prompts(make_validation_set("web", source_of_tokens(tokens), 64, 256)).rows[64]
        assert (50 in {token for row in rows for token in row[-NEEDLE:].tolist()}) != ends


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_each_prompt_is_asked_once_and_ranks_have_as_many_batches(size: int, micro_batch_size: int) -> None:
    prompts = _prompts()
    for length, rows in prompts.rows.items():
        ranks = [
            list(read_prompt_batches(prompts, length, World(rank, size, rank), micro_batch_size))
            for rank in range(size)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        asked = []
        for micro, places in [batch for batches in ranks for batch in batches]:
            assert micro.input_ids.numel() <= micro_batch_size * TEXT_LEN
            for ids, labels, place in zip(micro.input_ids, micro.labels, places, strict=True):
                if (labels == IGNORED).all():
                    continue
                assert (labels[:-KEY] == IGNORED).all()
                assert (labels[-KEY:] != IGNORED).all()
                row = [*ids.tolist(), int(labels[-1])]
                assert row[-KEY:] == labels[-KEY:].tolist()
                asked.append((row, int(place)))
        expected = [(row.tolist(), number % NUM_PLACES) for number, row in enumerate(rows)]
        assert sorted(asked) == sorted(expected)


def test_a_prompt_is_one_document() -> None:
    micro, _ = next(read_prompt_batches(_prompts(mask_documents=True), 64, World(), 1))
    assert micro.documents is not None
    assert not micro.documents.any()
    assert next(read_prompt_batches(_prompts(), 64, World(), 1))[0].documents is None


def test_the_score_is_the_share_of_the_surprise_that_hiding_took_away() -> None:
    prompts = _prompts()
    nll = np.array([[0, 20, 40, 80, 100, 80], [80] * 6, [8, 8, 8, 8, 160, 80]], dtype=np.float64)
    found = score_prompts(prompts, nll.reshape(-1))
    assert list(found) == ["64", "128", "256"]
    assert found["64"] == {"0": 1.0, "25": 0.75, "50": 0.5, "75": 0.0, "100": -0.25}
    assert set(found["128"].values()) == {0.0}
    assert list(found["256"].values()) == pytest.approx([0.9] * 4 + [-1])


def test_prompts_shorter_than_twice_the_question_are_left_out_and_the_longest_is_a_whole_sample() -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 2000)
    for seq_len, lengths in [(16, []), (48, [48]), (96, [64, 96]), (128, [64, 128])]:
        prompts = make_prompts(make_validation_set("web", source_of_tokens(tokens), seq_len, 10 * seq_len))
        assert list(prompts.rows) == lengths
        assert lengths == list_prompt_lengths(seq_len)
        assert score_prompts(prompts, np.zeros(0)) == {} if not lengths else True


def test_the_shortest_prompt_is_half_text() -> None:
    assert SHORTEST_PROMPT == 4 * NEEDLE
    assert (list_prompt_lengths(SHORTEST_PROMPT - 1), list_prompt_lengths(SHORTEST_PROMPT)) == (
        [],
        [SHORTEST_PROMPT],
    )


def test_two_tokens_are_enough_for_a_key() -> None:
    prompts = make_prompts(make_validation_set("web", source_of_tokens(np.arange(2000) % 2), 64, 640))
    assert prompts.rows[64].shape == (24, 65)


def test_markers_differ_between_sources_and_texts_not_between_lengths() -> None:
    rows = _prompts().rows
    ends = [[tuple(row[-NEEDLE:].tolist()) for row in r[::NUM_PLACES]] for r in rows.values()]
    assert all(a == b for a, b in pairwise(ends))
