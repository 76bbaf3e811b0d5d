"""The ledger over a whole run: whatever was skipped, and whenever a run started again, each draw counts once.

A run is walked through step by step with random rollbacks, skips, restarts and numbers of ranks, as the loop
does it but without a model. What it trained in the history that counts must be every draw but the union of
the ledger, once each, in order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.config.timeline import Segment, Timeline, parse_duration
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.sampler import Sampler, make_sampler
from ds_pretrain.watchdog import rollback_log as rollback_log_module
from ds_pretrain.watchdog.policy import Response, apply_rollback
from ds_pretrain.watchdog.rollback_log import RollbackLog, read_rollback_log, write_rollback_log
from tests.data.in_memory import SEQ_LEN, feed_of, source_of, timeline_of

HUNDRED = {"hundred": source_of(100)}
WORLDS = (1, 2, 4, 8)  # that divide a batch of eight
# Two phases, the first with a batch that grows, the second with sequences twice as long.
TIMELINE = Timeline(
    (
        Segment("main", 0, 20, SEQ_LEN, 8, first_sample=0, first_token=0, first_draw=0),
        Segment("main", 20, 30, SEQ_LEN, 16, first_sample=160, first_token=640, first_draw=160),
        Segment("long", 30, 50, 2 * SEQ_LEN, 8, first_sample=320, first_token=1280, first_draw=0),
    )
)
Draws = list[tuple[str, int]]  # (phase, draw)


def _skip(start: int, stop: int, phase: str = "main") -> Skip:
    return Skip(phase, start, stop, cause="spike", step=7, attempt=2)


def _union(ledger: SkipLedger) -> set[tuple[str, int]]:
    return {(s.phase, draw) for s in ledger.skips for draw in range(s.start, s.stop)}


def _read(timeline: Timeline, step: int, ledger: SkipLedger) -> Draws:
    """What the update after `step` finished steps reads."""
    segment = timeline.at(step)
    draws = ledger.draws(segment.phase, timeline.trained_draws_before(step), segment.sequences)
    return [(segment.phase, draw) for draw in draws.tolist()]


def _require_exact(trained: list[Draws], ledger: SkipLedger, timeline: Timeline) -> None:
    """Each phase's draws: as many as it has samples, rising, and up to the last all but the union."""
    union = _union(ledger)
    all_trained = list(chain.from_iterable(trained))
    for phase in dict.fromkeys(s.phase for s in timeline.segments):
        draws = [draw for p, draw in all_trained if p == phase]
        expected = [d for d in range(len(draws) + len(union)) if (phase, d) not in union][: len(draws)]
        assert draws == expected, phase
    assert [len(step) for step in trained] == [timeline.at(s).sequences for s in range(len(trained))]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unplugged here: a thousand syncs would be most of the time."""
    monkeypatch.setattr(rollback_log_module, "write_atomic", Path.write_text)


@pytest.fixture
def hundred() -> Sampler:
    """One source of a hundred samples, read in steps of eight."""
    return make_sampler(7, timeline_of(8, 40), {"main": {"hundred": 1.0}}, HUNDRED)


def _rows(feeds: list[BatchLoader], state: RunState) -> list[list[int]]:
    """The tokens of every sample of the global batch, over the ranks in order."""
    batches = [feed.at(state) for feed in feeds]
    return [
        [*inputs.tolist(), int(labels[-1])]
        for batch in batches
        for micro in batch.micro_batches
        for inputs, labels in zip(micro.input_ids, micro.labels, strict=True)
    ]


def _train(sampler: Sampler, text: str, stop: int, size: int) -> tuple[str, list[list[int]]]:
    """One start on `size` ranks, from a state's JSON to `stop` finished steps: its own JSON, and the rows."""
    state, rows = RunState.from_json(text), []
    feeds = [feed_of(sampler, HUNDRED, rank, size) for rank in range(size)]
    try:
        while state.step < stop:
            rows += _rows(feeds, state)
            state = state.after_step()
    finally:
        for feed in feeds:
            feed.__exit__(None, None, None)
    return state.to_json(), rows


def _samples_of(sampler: Sampler, draws: list[int]) -> list[int]:
    samples: list[int] = sampler.at_draws("main", SEQ_LEN, np.array(draws, np.uint64), 0).sample.tolist()
    return samples


def _tokens_of(samples: list[int]) -> list[list[int]]:
    rows: list[list[int]] = HUNDRED["hundred"].samples(np.array(samples), SEQ_LEN).tolist()
    return rows


def test_p55_of_a_hundred_samples_exactly_the_fifteen_skipped_are_never_trained_after_five_restarts(
    hundred: Sampler,
) -> None:
    """Eighty-five are left: ten steps of eight, and five of the next. Every start is on another world."""
    ledger = SkipLedger((_skip(10, 20), _skip(40, 45)))
    text, rows = RunState(ledger=ledger).to_json(), []
    for stop, size in ((1, 2), (2, 4), (4, 1), (5, 8), (9, 2), (11, 4)):
        text, more = _train(hundred, text, stop, size)
        rows += more
    left = [draw for draw in range(100) if not (10 <= draw < 20 or 40 <= draw < 45)]
    assert len(left) == 85
    assert rows[:85] == _tokens_of(_samples_of(hundred, left))
    trained = [tuple(row) for row in rows[:85]]
    assert len(set(trained)) == 85
    skipped = {tuple(row) for row in _tokens_of(list(range(100)))} - set(trained)
    assert skipped == {tuple(r) for r in _tokens_of(_samples_of(hundred, [*range(10, 20), *range(40, 45)]))}


@pytest.mark.parametrize("restart", [1, 2, 3, 5, 9])
def test_p55_a_skip_decided_before_or_after_a_restart_leaves_out_the_same_samples(
    hundred: Sampler, restart: int
) -> None:
    """Numbers are absolute: one that the restart has behind it shifts no later one."""
    early, late = _skip(10, 20), _skip(40, 45)
    text, whole = _train(hundred, RunState(ledger=SkipLedger((early, late))).to_json(), 11, 1)
    text, rows = _train(hundred, RunState(ledger=SkipLedger((early,))).to_json(), min(3, restart), 2)
    state = RunState.from_json(text)
    again = RunState(state.step, SkipLedger((*state.ledger.skips, late)))  # by then decided: 40 lies ahead
    text, more = _train(hundred, again.to_json(), restart, 4)
    text, rest = _train(hundred, text, 11, 8)
    assert rows + more + rest == whole


def test_p55_both_counters_follow_from_a_step_and_the_ledger() -> None:
    """Trained samples by the step; with the skipped ones before what is read next, the place in the order."""
    ledger = SkipLedger((_skip(10, 20), _skip(40, 45), _skip(0, 3, "long")))
    timeline = TIMELINE
    for step in range(timeline.last_step + 1):
        trained = [d for s in range(step) for d in _read(timeline, s, ledger)]
        assert timeline.samples_before(step) == len(trained)
        assert sum(timeline.trained_by_phase(step).values()) == len(trained)
        seen = set(trained)
        if step < timeline.last_step:
            phase, next_draw = _read(timeline, step, ledger)[0]
            seen |= {(p, d) for p, d in _union(ledger) if p != phase or d < next_draw}
            if phase == "main":
                seen -= {("long", d) for d in range(3)}
        else:
            seen |= _union(ledger)
        read = [int(ledger.draws(p, n, 1)[0]) for p, n in timeline.trained_by_phase(step).items()]
        assert sum(read) == len(seen), step


@dataclass
class _Walk:
    """A run without a model: what the loop does to its state, its checkpoints and its cure."""

    timeline: Timeline
    section: WatchdogSection
    out: Path
    state: RunState = field(default_factory=RunState)
    trained: list[Draws] = field(default_factory=list)  # by step, in the history that counts
    checkpoints: dict[int, str] = field(default_factory=dict)

    def step(self) -> None:
        del self.trained[self.state.step :]
        self.trained.append(_read(self.timeline, self.state.step, self.state.ledger))
        self.state = self.state.after_step()

    def save(self) -> None:
        self.checkpoints[self.state.step] = self.state.to_json()

    def roll_back(self, base_step: int, onset: int, action: str, dies: bool) -> None:
        """To an older checkpoint; with `dies`, the process ends once the cure is written."""
        rollback = Rollback(base_step, self.state.step, onset, "spike", action, 1)
        base = RunState.from_json(self.checkpoints[base_step])
        response = Response("skip" if action == "skip" else "replay", base_step, "")
        after = apply_rollback(self.state, base, response, rollback, self.section, self.timeline)
        write_rollback_log(self.out, after)
        if dies:
            return self.start()
        self.checkpoints = {step: text for step, text in self.checkpoints.items() if step <= base_step}
        self.state = after
        return None

    def start(self) -> None:
        """Another start: from the newest checkpoint that no rollback has left."""
        known = read_rollback_log(self.out)
        for step in sorted(self.checkpoints, reverse=True):
            state = RunState.from_json(self.checkpoints[step])
            if not known.is_abandoned(state):
                self.state = known.apply_to(state)
                return
            del self.checkpoints[step]
        raise AssertionError("no checkpoint is left")


def _walks(seeds: range, out: Path, timeline: Timeline) -> Iterator[tuple[_Walk, Callable[[int], int]]]:
    """Runs to the last step that met random trouble on the way, each with the dice that it was made by."""
    for seed in seeds:
        draw = Random(seed).randrange
        before, after = (parse_duration(f"{n} steps") for n in (draw(6), 1 + draw(12)))
        section = WatchdogSection(skip_before=before, skip_after=after)
        folder = out / str(seed)
        folder.mkdir()
        walk = _Walk(timeline, section, folder)
        walk.save()
        budget = 8
        while walk.state.step < timeline.last_step:
            walk.step()
            if draw(3) == 0:
                walk.save()
            if draw(12) == 0:
                walk.start()  # killed: what was not saved is trained again
            older = [s for s in walk.checkpoints if s < walk.state.step]
            if draw(5) == 0 and budget and older:
                base = older[draw(len(older))]
                onset = base + 1 + draw(walk.state.step - base)
                action = "skip" if draw(3) else "replay"
                walk.roll_back(base, onset, action, dies=draw(3) == 0)
                budget -= 1
        yield walk, draw


@pytest.mark.parametrize("timeline", [TIMELINE, timeline_of(8, 50)], ids=["two phases", "one phase"])
def test_p55_random_skips_rollbacks_kills_and_restarts_leave_out_the_union_and_nothing_else(
    tmp_path: Path, timeline: Timeline
) -> None:
    num_skips = []
    for walk, _ in _walks(range(150), tmp_path, timeline):
        _require_exact(walk.trained, walk.state.ledger, timeline)
        num_skips.append(len(walk.state.ledger.skips))
    assert max(num_skips) >= 5
    assert np.median(num_skips) >= 2


def test_p55_any_step_of_a_random_run_is_read_alike_on_one_to_eight_ranks(tmp_path: Path) -> None:
    """Each rank's share, put together in the order of ranks, is the global batch."""
    sources = {"text": source_of(60, 1), "code": source_of(300, 2)}
    weights = {"main": {"text": 0.7, "code": 0.3}, "long": {"code": 1.0}}
    sampler = make_sampler(7, TIMELINE, weights, sources)
    for walk, draw in _walks(range(6), tmp_path, TIMELINE):
        for step in {draw(TIMELINE.last_step) for _ in range(4)} | {19, 20, 29, 30, 49}:
            state = RunState(step, walk.state.ledger)
            seen = []
            for size in WORLDS:
                feeds = [feed_of(sampler, sources, rank, size) for rank in range(size)]
                seen.append(_rows(feeds, state))
                for feed in feeds:
                    feed.__exit__(None, None, None)
            assert seen[0] == seen[1] == seen[2] == seen[3]
            ids = sampler.ids(step, state.ledger)
            assert [(TIMELINE.at(step).phase, d) for d in ids.draw.tolist()] == walk.trained[step]
            assert len(seen[0]) == len(ids.sample)


@pytest.mark.parametrize("base_step", [0, 10, 28, 30])
def test_a_skip_stays_within_its_phase_and_the_next_phase_reads_on_as_before(base_step: int) -> None:
    """Windows that reach from `main` into `long`, back from `long` into `main`, and past the last step."""
    before, after = (parse_duration(f"{n} steps") for n in (6, 12))
    section = WatchdogSection(skip_before=before, skip_after=after)
    read = [_read(TIMELINE, step, SkipLedger()) for step in range(50)]
    for onset in range(base_step + 1, 51):
        rollback = Rollback(base_step, min(50, onset + 3), onset, "spike", "skip", 1)
        response = Response("skip", base_step, "")
        base = RunState(base_step)
        after = apply_rollback(RunState(rollback.step), base, response, rollback, section, TIMELINE)
        [skip] = after.ledger.skips
        assert skip.phase == TIMELINE.at(onset - 1).phase
        steps = range(max(base_step, onset - 7), min(50, onset + 11))
        window = {draw for step in steps for draw in read[step] if draw[0] == skip.phase}
        assert _union(after.ledger) == window  # the steps of the window, whole
        reread = [_read(TIMELINE, step, after.ledger) for step in range(50)]
        other = [s for s in range(50) if TIMELINE.at(s).phase != skip.phase]
        assert [reread[s] for s in other] == [read[s] for s in other]
        assert reread[:base_step] == read[:base_step]  # what the checkpoint has trained stays as it was
        _require_exact(reread, after.ledger, TIMELINE)


def test_skips_that_overlap_in_any_order_of_decision_leave_the_same_draws() -> None:
    skips = [_skip(10, 30), _skip(20, 50), _skip(5, 12), _skip(48, 49), _skip(60, 61)]
    random = np.random.default_rng(0)
    expected = SkipLedger(tuple(skips)).draws("main", 0, 100).tolist()
    for _ in range(50):
        order = random.permutation(len(skips))
        ledger = SkipLedger(tuple(skips[i] for i in order))
        assert ledger.draws("main", 0, 100).tolist() == expected


def test_a_skip_longer_than_all_the_data_wraps_into_the_next_epochs_and_trains_on(hundred: Sampler) -> None:
    """A source is never used up: what a skip leaves a phase is read from later epochs of it."""
    ledger = SkipLedger((_skip(0, 1050),))
    ids = hundred.ids(0, ledger)
    assert ids.draw.tolist() == list(range(1050, 1058))
    assert set(ids.epoch.tolist()) == {10}


def test_a_cure_of_an_older_start_never_shortens_the_ledger_of_a_checkpoint() -> None:
    """A rollbacks.json that an old copy was put in place of: the checkpoint that knows more is believed."""
    first, second = (Rollback(4, 9, 7, "spike", "skip", 1), Rollback(10, 19, 17, "spike", "skip", 1))
    ledgers = SkipLedger((_skip(40, 80),)), SkipLedger((_skip(40, 80), _skip(120, 160)))
    newer = RunState(24, ledgers[1], rollbacks=(first, second))
    assert RollbackLog((first,), ledgers[0].skips).apply_to(newer) == newer
    assert not RollbackLog((first,), ledgers[0].skips).is_abandoned(newer)
