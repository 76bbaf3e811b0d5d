"""The use of each source by a run, against a walk through it, and when it passes an epoch."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.core.text import format_epochs
from ds_pretrain.data import chunks as module
from ds_pretrain.data.filtered import open_filtered
from ds_pretrain.data.indexed import TokenSource
from ds_pretrain.data.mixture import BLOCK_DRAWS
from ds_pretrain.data.sampler import make_sampler
from ds_pretrain.data.usage import (
    SourceRead,
    check_usage,
    compute_usage,
    find_overlaps,
    find_step_beyond,
    format_usage,
    read_so_far,
)
from tests.data.in_memory import SEQ_LEN, source_of
from tests.data.slow_order import Phase, cases, timeline

TWO_PHASES: list[Phase] = [("main", 4, [(100, 8)]), ("long", 16, [(50, 8)])]
MIXTURES = {"main": {"web": 3.0, "code": 1.0}, "long": {"web": 1.0, "books": 1.0}}
SOURCES = {"web": source_of(1600, 1), "code": source_of(2000, 2), "books": source_of(400, 3)}


def test_the_use_of_a_source_is_what_a_walk_through_the_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EPOCH_WINDOWS", 4)
    num_repeated = num_left_out = 0
    for case in cases(range(200, 216)):
        walked, earlier = case.walked(), dict.fromkeys(case.sources, 0)
        uses = compute_usage(case.sampler, case.ledger)
        for phase, drawn in walked.drawn.items():
            counts = Counter(name for name, _, _ in drawn)
            again = Counter(name for name, epoch, _ in drawn if epoch)
            mine = {use.source: use for use in uses if use.phase == phase}
            assert set(mine) == set(case.weights[phase])
            for name, use in mine.items():
                assert use.draws == counts[name]
                assert use.share == counts[name] / len(drawn)
                assert use.tokens == counts[name] * use.seq_len
                assert use.repeated_tokens == again[name] * use.seq_len
                passed = walked.passed[phase].get(name, 0) / case.sampler.chunks[name].num_chunks
                assert use.epochs == pytest.approx(passed)
                assert use.unused_tokens == walked.left_out[phase][name] - earlier[name]
                num_repeated += use.repeated_tokens > 0
                num_left_out += use.unused_tokens > 0
            earlier = walked.left_out[phase]
    assert min(num_repeated, num_left_out) >= 5


def test_what_was_read_up_to_a_step_is_what_a_walk_there_counts_skips_apart() -> None:
    num_skipped = 0
    for case in cases(range(400, 416)):
        walked, line = case.walked(), case.line
        for step in (0, 1, line.last_step // 3, line.last_step // 2, line.last_step - 1, line.last_step):
            tokens, skipped = Counter[str](), Counter[str]()
            current = line.at(max(0, step - 1)).phase
            for phase, drawn in walked.drawn.items():
                seq_len, trained = line.seq_len_of(phase), line.trained_by_phase(step).get(phase, 0)
                out = {d for s in case.ledger.skips if s.phase == phase for d in range(s.start, s.stop)}
                left, mine = trained, Counter[str]()
                for number, (name, _, _) in enumerate(drawn if trained else []):
                    if number not in out and not left:
                        break
                    left -= number not in out
                    (skipped if number in out else mine)[name] += seq_len
                tokens += mine
                if phase == current and trained:
                    shares = {name: mine[name] / seq_len / trained for name in case.weights[phase]}
            found = read_so_far(case.sampler, step, case.ledger)
            assert {name: read.tokens for name, read in found.items() if read.tokens} == tokens
            assert {
                name: read.skipped_tokens for name, read in found.items() if read.skipped_tokens
            } == skipped
            if step:
                assert {name: read.share for name, read in found.items() if read.share is not None} == shares
            num_skipped += bool(skipped)
        for phase in walked.passed:
            [step] = [s.end_step for s in line.segments if s.phase == phase][-1:]
            passed = {
                name: n / case.sampler.chunks[name].num_chunks for name, n in walked.passed[phase].items()
            }
            found = read_so_far(case.sampler, step, case.ledger)
            assert {n: read.epochs for n, read in found.items() if read.epochs} == pytest.approx(passed)
    assert num_skipped > 10


def test_what_was_read_has_its_share_of_the_phase_beside_the_weight() -> None:
    sampler = make_sampler(7, timeline(TWO_PHASES), MIXTURES, SOURCES)
    ledger = SkipLedger((Skip("main", 80, 120, "spike", 10, 1),))
    assert read_so_far(sampler, 0)["web"] == SourceRead(0, 0, 0.0, None, 0.75)
    half, end = read_so_far(sampler, 50, ledger), read_so_far(sampler, 150, ledger)
    assert half["books"] == SourceRead(0, 0, 0.0, None, None)
    assert half["web"].tokens + half["code"].tokens == 400 * 4
    assert half["web"].skipped_tokens + half["code"].skipped_tokens == 40 * 4
    assert half["web"].share == half["web"].tokens / 1600
    assert half["web"].epochs == (half["web"].tokens + half["web"].skipped_tokens) / 6400
    assert (half["web"].weight, half["code"].weight) == (0.75, 0.25)
    assert (end["code"].share, end["code"].weight) == (None, None)
    assert (end["books"].weight, end["code"].tokens) == (
        0.5,
        read_so_far(sampler, 100, ledger)["code"].tokens,
    )
    assert sum(read.tokens for read in end.values()) == sampler.timeline.total_tokens


def test_the_step_at_which_an_epoch_is_passed_is_the_first_that_reads_of_the_next() -> None:
    num_found = 0
    for case in cases(range(300, 316)):
        free, no_skips = case.sampler, SkipLedger()
        steps = [free.ids(step, no_skips).to_list() for step in range(case.line.last_step)]
        for name in free.chunks:
            for epochs in (1, 2, 3):
                beyond = [
                    at
                    for at, batch in enumerate(steps)
                    if any(n == name and e >= epochs for n, e, _ in batch)
                ]
                expected = (beyond[0] + 1, case.line.at(beyond[0]).phase) if beyond else None
                assert find_step_beyond(free, name, epochs) == expected
                num_found += expected is not None
    assert num_found > 10


def test_skipped_draws_bring_the_end_of_an_epoch_nearer() -> None:
    sampler = make_sampler(7, timeline([("m", 4, [(100, 8)])]), {"m": {"a": 1.0}}, {"a": source_of(400)})
    assert find_step_beyond(sampler, "a", 1) == (51, "m")
    assert find_step_beyond(sampler, "a", 1.5) == (76, "m")
    assert find_step_beyond(sampler, "a", 2) is None
    ledger = SkipLedger((Skip("m", 16, 96, "spike", 3, 1),))
    assert find_step_beyond(sampler, "a", 1, ledger) == (41, "m")
    assert compute_usage(sampler, ledger)[0].epochs == pytest.approx(2.2)


def test_the_lines_of_one_phase_say_share_tokens_and_epochs() -> None:
    sampler = make_sampler(7, timeline([("main", 4, [(100, 8)])]), {"main": MIXTURES["main"]}, SOURCES)
    assert list(format_usage(sampler, SOURCES)) == [
        "source     code: 8,001 tokens, 1 document; 26.0% of the draws, 832 tokens, 0.10 epochs",
        "source     web: 6,401 tokens, 1 document; 74.0% of the draws, 2,368 tokens, 0.37 epochs",
    ]


def test_the_lines_of_several_phases_say_what_each_reads_and_what_is_repeated() -> None:
    sampler = make_sampler(7, timeline(TWO_PHASES), MIXTURES, SOURCES)
    assert list(format_usage(sampler, SOURCES)) == [
        "source     code: 8,001 tokens, 1 document; 832 tokens of it are read, 0.10 epochs",
        "           main: 26.0% of the draws, 832 tokens in 208 samples of 4; 0.10 epochs by its end",
        "source     web: 6,401 tokens, 1 document; 5,360 tokens of it are read, 0.86 epochs",
        "           main: 74.0% of the draws, 2,368 tokens in 592 samples of 4; 0.37 epochs by its end",
        "           long: 46.8% of the draws, 2,992 tokens in 187 samples of 16; 0.86 epochs by its end; "
        "128 tokens before it wait for the next epoch, as the length changes",
        "source     books: 1,601 tokens, 1 document; 3,408 tokens of it are read, 2.13 epochs",
        "           long: 53.2% of the draws, 3,408 tokens in 213 samples of 16, 1,808 of them not for the "
        "first time; 2.13 epochs by its end",
        "warning    sources.books passes one epoch at step 123 (phase long), and the run reads 2.13 epochs: "
        "what was read is read again from there on",
    ]


def test_max_epochs_is_an_error_with_the_step_and_the_numbers() -> None:
    sampler = make_sampler(7, timeline(TWO_PHASES), MIXTURES, SOURCES)
    assert check_usage(sampler, {"web": None, "code": 1, "books": 3, "unused": 1.0}) == []
    [web, books] = check_usage(sampler, {"web": 0.5, "code": 1, "books": 1.5})
    assert web == (
        "sources.web.max_epochs = 0.5 is passed at step 112 of 150 (phase long): the run takes 5,360 tokens "
        "of 6,400, 0.86 epochs; shorten the run, lower the weight of web, add text to it, or raise max_epochs"
    )
    assert "sources.books.max_epochs = 1.5 is passed at step 137 of 150 (phase long)" in books


def test_a_source_may_be_read_exactly_as_often_as_it_may() -> None:
    sampler = make_sampler(7, timeline([("m", 4, [(100, 8)])]), {"m": {"a": 1.0}}, {"a": source_of(400)})
    assert check_usage(sampler, {"a": 2}) == []
    [problem] = check_usage(sampler, {"a": 1.99})
    assert "sources.a.max_epochs = 1.99 is passed at step 100 of 100 (phase m)" in problem


def _corpus(place: str, lengths: list[int]) -> TokenSource:
    stream = np.zeros(sum(lengths), "<u2")
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    return TokenSource(Path(place), stream, np.array(lengths, np.int32), bounds, None)


def test_names_over_the_same_documents_are_said_to_repeat_one_another() -> None:
    web = _corpus("data/web", [10, 20, 30, 40, 50])
    elsewhere = _corpus("data/other", [10, 20, 30, 40, 50])
    long, short, middle = (
        open_filtered(web, 30, None),
        open_filtered(web, None, 29),
        open_filtered(web, 20, 40),
    )
    assert list(find_overlaps({"web": web, "other": elsewhere})) == []
    assert list(find_overlaps({"short": short, "long": long})) == []
    assert list(find_overlaps({"web": web, "again": web})) == [
        "sources.web and sources.again have 5 documents of data/web in common, 150 tokens: each repeats "
        "what the other reads, and their epochs are counted apart"
    ]
    for pair, documents, tokens in (
        ({"web": web, "long": long}, 3, 120),
        ({"long": long, "web": web}, 3, 120),
        ({"short": short, "middle": middle}, 1, 20),
        ({"middle": middle, "long": long}, 2, 70),
    ):
        [words] = find_overlaps(pair)
        noun = "document" if documents == 1 else "documents"
        assert f" have {documents} {noun} of data/web in common, {tokens} tokens:" in words
    assert len(list(find_overlaps({"web": web, "long": long, "middle": middle, "other": elsewhere}))) == 3


def test_the_lines_warn_of_an_epoch_that_is_passed_and_of_documents_in_common() -> None:
    sources = {"a": source_of(400), "b": source_of(400), "unused": source_of(400)}
    weights = {"m": {"a": 3.0, "b": 1.0}}
    sampler = make_sampler(7, timeline([("m", SEQ_LEN, [(80, 8)])]), weights, sources)
    warnings = [line for line in format_usage(sampler, sources) if line.startswith("warning")]
    assert warnings == [
        "warning    sources.a passes one epoch at step 69 (phase m), and the run reads 1.19 epochs: what was "
        "read is read again from there on",
        "warning    sources.a and sources.b have 1 document of memory_0 in common, 1,601 tokens: each "
        "repeats what the other reads, and their epochs are counted apart",
    ]


def test_a_phases_mixture_holds_from_its_first_draw_and_to_each_of_its_blocks() -> None:
    """A phase that ends within a block leaves nothing to the next: its blocks are its own."""
    phases: list[Phase] = [("main", 4, [(37, 64)]), ("next", 4, [(3 * BLOCK_DRAWS // 64, 64)])]
    weights = {"main": {"web": 0.9, "code": 0.1}, "next": {"web": 0.25, "code": 0.5, "books": 0.25}}
    sampler = make_sampler(7, timeline(phases), weights, SOURCES)
    draws = [s for step in range(37, 37 + 192) for s in sampler.ids(step, SkipLedger()).to_list()]
    quotas = {"web": BLOCK_DRAWS // 4, "code": BLOCK_DRAWS // 2, "books": BLOCK_DRAWS // 4}
    for block in range(3):
        names = Counter(name for name, _, _ in draws[block * BLOCK_DRAWS : (block + 1) * BLOCK_DRAWS])
        assert names == quotas
    first = Counter(name for name, _, _ in draws[:256])
    assert 90 <= first["code"] <= 166  # of 256, half by weight
    assert first["books"] >= 38
    assert [use.share for use in compute_usage(sampler) if use.phase == "next"] == [0.25, 0.5, 0.25]


def test_a_small_number_of_epochs_is_told_with_its_digits_and_one_just_over_a_cap_as_more() -> None:
    assert [format_epochs(n) for n in (0.0, 0.00123, 0.374, 2.0)] == [
        "0.00 epochs",
        "0.0012 epochs",
        "0.37 epochs",
        "2.00 epochs",
    ]
    assert format_epochs(1.0004, 1) == "1.0004 epochs"
    few = make_sampler(7, timeline([("main", 4, [(1, 8)])]), {"main": MIXTURES["main"]}, SOURCES)
    [problem] = check_usage(few, {"web": 0.001})
    assert "28 tokens of 6,400, 0.0044 epochs; shorten" in problem
