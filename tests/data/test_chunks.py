"""The order over several phases, against one that is walked from the start, and what it promises."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from ds_pretrain.config.timeline import (
    Segment,
    Timeline,
    check_chunk_lengths,
    compute_chunk_lengths,
    find_changed_chunks,
)
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.data import chunks as module
from ds_pretrain.data.chunks import Chunks, Position
from ds_pretrain.data.mixture import locate_samples
from ds_pretrain.data.permutation import permute
from ds_pretrain.data.sampler import make_sampler
from tests.data.in_memory import feed_of, source_of
from tests.data.slow_order import Case, Phase, Walk, cases, timeline


def _all(phases: Iterable[str], **mixture: float) -> dict[str, dict[str, float]]:
    return {phase: dict(mixture) for phase in phases}


@pytest.fixture(params=[None, 3], ids=["usual windows", "windows of a third"])
def windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(module, "EPOCH_WINDOWS", request.param)


def test_p03_any_step_of_any_run_reads_what_a_walk_from_the_start_reads(windows: None) -> None:
    num_epochs, num_lengths = Counter[int](), Counter[int]()
    for case in cases(range(12)):
        walked, sampler = case.walked(), case.sampler
        for step, expected in enumerate(walked.steps):
            assert sampler.ids(step, case.ledger).to_list() == expected
            num_epochs.update(epoch for _, epoch, _ in expected)
        num_lengths[len({segment.seq_len for segment in case.line.segments})] += 1
    assert max(num_epochs) >= 5  # the cases reach what they are for
    assert min(num_lengths[n] for n in (1, 2, 3)) >= 2


def test_p39_no_token_is_read_twice_before_its_epoch_is_through(windows: None) -> None:
    """Over all phases; the rest of an epoch is left out where the length changes, and nothing else is."""
    num_left_out = 0
    for case in cases(range(40, 50)):
        walked, seq_lens = case.walked(), {s.phase: s.seq_len for s in case.line.segments}
        times = {name: Counter[tuple[int, int]]() for name in case.sources}  # (epoch, token)
        last_epoch: dict[str, int] = {}
        for phase, drawn in walked.drawn.items():
            ids = case.sampler.at_draws(
                phase, seq_lens[phase], np.arange(len(drawn), dtype=np.uint64), 0, case.ledger
            )
            for name, epoch, sample in ids.to_list():
                first = sample * seq_lens[phase]
                times[name].update((epoch, first + at) for at in range(seq_lens[phase]))
                assert epoch >= last_epoch.get(name, 0)  # one epoch after another
                last_epoch[name] = epoch
        for name, counts in times.items():
            assert set(counts.values()) <= {1}
            for epoch in range(last_epoch.get(name, 0)):  # those that are through
                chunks = case.sampler.chunks[name]
                read = sum(e == epoch for e, _ in counts)
                out = _left_out_tokens(walked, case, name, epoch)
                assert read + out == chunks.num_chunks * chunks.chunk_tokens
                num_left_out += out
    assert num_left_out > 0


def _left_out_tokens(walked: Walk, case: Case, name: str, epoch: int) -> int:
    """Of an epoch, by the positions of the sampler: what is between the end of a stretch and the next."""
    sampler, left = case.sampler, 0
    phases = list(dict.fromkeys(segment.phase for segment in case.line.segments))
    position, chunks = Position(), sampler.chunks[name]
    for phase in phases:
        counts = Counter(source for source, _, _ in walked.drawn[phase])
        seq_len = sampler.timeline.seq_len_of(phase)
        if counts[name] and position.draws and position.seq_len != seq_len:
            end = chunks.end_of_window(position)
            unread = round((end - chunks.chunks_before(position)) * chunks.chunk_tokens)
            left += unread if (end - 1) // chunks.num_chunks == epoch else 0
            assert unread < chunks.window_chunks * chunks.chunk_tokens  # less than a window
        position = chunks.after(position, seq_len, counts[name])
    return left


def test_what_an_entry_of_the_ledger_leaves_out_is_what_would_have_been_read() -> None:
    """In any phase: entries of earlier phases move where it begins, and its own entries move nothing."""
    num_skips = 0
    for case in cases(range(80, 92)):
        drawn = case.walked().drawn
        for skip in case.ledger.skips:
            told = case.sampler.skipped(skip, case.ledger).to_list()
            known = drawn[skip.phase][skip.start : skip.stop]  # a skip may reach past the end of its phase
            assert told[: len(known)] == known
            num_skips += len(known) > 0
            others = SkipLedger(tuple(s for s in case.ledger.skips if s.phase != skip.phase))
            assert case.sampler.skipped(skip, others).to_list() == told
    assert num_skips > 6


def test_a_skip_moves_the_phases_after_it_on_and_leaves_those_before_alone() -> None:
    line = timeline([("one", 4, [(10, 8)]), ("two", 4, [(10, 8)]), ("three", 4, [(10, 8)])])
    sampler = make_sampler(7, line, _all(("one", "two", "three"), a=1.0), {"a": source_of(1000)})
    skipping = SkipLedger((Skip("two", 30, 50, "spike", 5, 1),))
    straight, moved = (
        [sample for step in range(30) for sample in sampler.ids(step, ledger).to_list()]
        for ledger in (SkipLedger(), skipping)
    )
    assert moved == straight[:110] + straight[130:] + moved[220:]
    assert len({*moved}) == 240
    assert not {*moved} & {*straight[110:130]}


def test_phases_of_one_length_read_on_as_if_they_were_one() -> None:
    """Today's order, whatever the phases: the chunks are the samples."""
    whole = make_sampler(7, timeline([("m", 4, [(61, 8)])]), {"m": {"a": 1.0}}, {"a": source_of(100)})
    parts = timeline([("m", 4, [(7, 8)]), ("n", 4, [(20, 16), (5, 8)]), ("o", 4, [(9, 8)])])
    split = make_sampler(7, parts, _all("mno", a=1.0), {"a": source_of(100)})
    expected = [sample for step in range(61) for sample in whole.ids(step, SkipLedger()).to_list()]
    found = [sample for step in range(41) for sample in split.ids(step, SkipLedger()).to_list()]
    assert found == expected
    assert len(found) == 488


def test_a_phase_of_the_same_length_reads_the_window_to_its_end(windows: None) -> None:
    chunks, odd = {"a": 64}, 13  # draws: within a window
    sources, weights = {"a": source_of(3200)}, _all("mn", a=1.0)
    one = make_sampler(7, timeline([("m", 4, [(2 * odd, 1)])]), weights, sources, chunks)
    two = make_sampler(7, timeline([("m", 4, [(odd, 1)]), ("n", 4, [(odd, 1)])]), weights, sources, chunks)
    assert [one.ids(step, SkipLedger()).to_list() for step in range(2 * odd)] == [
        two.ids(step, SkipLedger()).to_list() for step in range(2 * odd)
    ]


def test_what_lies_ahead_does_not_move_what_was_read() -> None:
    """Lengthened, changed, added or left out: as long as the chunks stay."""
    for case in cases(range(130, 140)):
        chunks, segments = case.sampler_chunks(), case.line.segments
        phases = list(dict.fromkeys(segment.phase for segment in segments))
        past = [segment for segment in segments if segment.phase != phases[-1]]
        step = past[-1].end_step
        ahead = Segment("new", step, step + 9, 2, 3, 0, 0, 0)
        weights = {**case.weights, "new": {"b": 1.0, "c": 2.0}}
        known = chunks | {name: 64 for name in "bc" if name not in chunks}
        changed = make_sampler(7, Timeline((*past, ahead)), weights, case.sources, known)
        assert [changed.ids(s, case.ledger).to_list() for s in range(step)] == [
            case.sampler.ids(s, case.ledger).to_list() for s in range(step)
        ]


def test_every_number_of_ranks_reads_the_same_batches_of_every_phase() -> None:
    line = timeline([("main", 4, [(3, 8), (3, 16)]), ("long", 8, [(4, 8)])])
    weights = {"main": {"a": 0.7, "b": 0.3}, "long": {"b": 1.0}}
    sources = {"a": source_of(60, 1), "b": source_of(300, 2)}
    ledger = SkipLedger((Skip("main", 5, 30, "spike", 3, 1),))
    sampler = make_sampler(7, line, weights, sources)
    for step in range(line.last_step):
        seen = []
        for size in (1, 2, 4, 8):
            rows = []
            for rank in range(size):
                with feed_of(sampler, sources, rank, size) as feed:
                    batch = feed.read(step, ledger)
                rows += [micro.input_ids.tolist() for micro in batch.micro_batches]
            seen.append(rows)
        assert seen[0] == seen[1] == seen[2] == seen[3]


def test_pieces_of_a_chunk_lie_apart() -> None:
    """Of 100,000 chunks of 8 pieces the windows are full ones: neighbors are of one chunk hardly ever."""
    chunks = Chunks(100_000, 32, 5)
    _, sample = chunks.locate(Position(), 4, np.arange(10 * 8192, dtype=np.uint64))
    chunk = (sample // 8).reshape(10, 8192)
    for window in chunk:
        assert sorted(Counter(window.tolist()).values()) == [8] * 1024
    same = (chunk[:, 1:] == chunk[:, :-1]).mean()
    assert same == pytest.approx(7 / 8191, rel=0.3)


def test_p06_far_away_costs_no_more_than_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[int] = []

    def counting(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
        worked.append(index.size)
        return permute(index, size, key)

    monkeypatch.setattr(module, "permute", counting)
    phases: list[Phase] = [("main", 4, [(10**6, 8)]), ("long", 32, [(10**6, 8)]), ("end", 4, [(10**6, 8)])]
    weights = _all(("main", "long", "end"), a=0.5, b=0.5)
    sampler = make_sampler(7, timeline(phases), weights, {"a": source_of(800), "b": source_of(4000)})
    for step in (5, 3 * 10**6 - 1):
        worked.clear()
        sampler.ids(step, SkipLedger())
        assert sum(worked) == 8


def test_the_order_of_windows_is_pinned() -> None:
    """Another number here means that no checkpoint continues the run that it came from."""
    line = timeline([("main", 4, [(40, 8)]), ("long", 16, [(40, 8)])])
    sources = {"a": source_of(400), "b": source_of(3000)}
    sampler = make_sampler(7, line, _all(("main", "long"), a=0.5, b=0.5), sources)
    assert [sampler.ids(step, SkipLedger()).to_list() for step in (3, 39, 40)] == [
        [
            ("a", 0, 106),
            ("a", 0, 54),
            ("a", 0, 107),
            ("a", 0, 168),
            ("b", 0, 2354),
            ("b", 0, 1839),
            ("a", 0, 53),
            ("a", 0, 55),
        ],
        [
            ("a", 0, 230),
            ("a", 0, 232),
            ("b", 0, 2090),
            ("a", 0, 314),
            ("b", 0, 984),
            ("a", 0, 315),
            ("b", 0, 2648),
            ("a", 0, 228),
        ],
        [
            ("b", 0, 377),
            ("a", 0, 0),
            ("a", 0, 50),
            ("b", 0, 449),
            ("b", 0, 616),
            ("b", 0, 468),
            ("b", 0, 649),
            ("b", 0, 321),
        ],
    ]


def test_positions_of_huge_sources_are_exact() -> None:
    chunks = Chunks(10**11, 8192, 5)
    draws = np.array([0, 7, 10**12], dtype=np.uint64)
    start = chunks.after(Position(), 2048, 3 * 10**11 + 5)
    assert chunks.end_of_window(start) % 1024 == 0
    epoch, sample = chunks.locate(start, 8192, draws)
    first = chunks.end_of_window(start)
    again = locate_samples(draws + np.uint64(first), 10**11, 5)
    assert (epoch.tolist(), sample.tolist()) == (again[0].tolist(), again[1].tolist())
    assert (int(sample.max()) + 1) * 8192 <= 10**11 * 8192


@pytest.mark.parametrize("declared", [None, 4096])
def test_lengths_that_do_not_divide_a_chunk_are_refused_by_name(declared: int | None) -> None:
    seq_lens = {"main": 4096, "odd": 6000, "long": 8192}
    weights = {"main": {"web": 1.0, "code": 1.0}, "odd": {"code": 1.0}, "long": {"web": 1.0}}
    chunks = {"web": declared or 8192, "code": declared or 6000}
    problems = check_chunk_lengths(seq_lens, weights, chunks)
    if declared is None:
        assert problems == [
            "phases.main.seq_len = 4,096: sources.code is read in chunks of 6,000 tokens (its phases take "
            "main 4,096, odd 6,000), which sequences of every phase must divide; choose lengths that divide "
            "one another, or give the phase a source of another name with the same path, which has an order "
            "of its own and repeats what was read under the first name"
        ]
    else:
        assert problems[0].startswith(
            "sources.web.chunk_tokens = 4,096 and phases.long.seq_len = 8,192: sources.web is read in chunks "
            "of 4,096 tokens"
        )
        assert len(problems) == 2


def test_a_source_is_cut_into_what_is_declared_or_into_its_longest_samples() -> None:
    seq_lens = {"main": 4096, "long": 32768}
    weights = {"main": {"web": 1.0, "code": 1.0}, "long": {"web": 1.0, "books": 1.0}}
    declared = {"code": 8192, "web": None, "unused": 64}
    assert compute_chunk_lengths(seq_lens, weights, declared) == {"web": 32768, "code": 8192, "books": 32768}
    line = timeline([("main", 4, [(9, 1)])])
    sampler = make_sampler(7, line, {"main": {"a": 1.0}}, {"a": source_of(64)}, {"a": 16})
    assert (sampler.chunks["a"].num_chunks, sampler.chunks["a"].chunk_tokens) == (16, 16)
    shuffled = [sampler.ids(step, SkipLedger()).to_list()[0][2] for step in range(4)]
    assert len({sample // 4 for sample in shuffled}) == 1  # the pieces of a window of one chunk


def test_a_sampler_of_lengths_that_do_not_divide_is_refused() -> None:
    line = timeline([("one", 4, [(1, 1)]), ("two", 6, [(1, 1)])])
    with pytest.raises(InputError, match=r"phases.one.seq_len = 4: sources.a is read in chunks of 6 tokens"):
        make_sampler(7, line, {"one": {"a": 1.0}, "two": {"a": 1.0}}, {"a": source_of(60)})


def test_chunks_that_change_under_a_run_are_refused_with_the_way_out() -> None:
    old = {"web": 4096, "code": 32768, "math": 4096, "gone": 4096}
    longer, shorter = find_changed_chunks(old, {"web": 32768, "code": 4096, "math": 4096, "new": 512})
    assert longer == (
        "sources.web was read in chunks of 4,096 tokens, and would continue in chunks of 32,768: some "
        "tokens would be read twice and others never; set sources.web.chunk_tokens = 4096, and give the "
        "phase with longer sequences a source of another name with the same path"
    )
    assert shorter.endswith("others never; set sources.code.chunk_tokens = 32768")
