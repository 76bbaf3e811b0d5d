"""The order of a run's data: a pure function of the step, whole epochs, and one cost for every step."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ds_pretrain.core.state import Skip, SkipLedger
from ds_pretrain.data import mixture
from ds_pretrain.data.sampler import Sampler, make_sampler
from tests.data.in_memory import sampler_of, source_of
from tests.data.slow_order import Phase, timeline

NO_SKIPS = SkipLedger()


def _order(sampler: Sampler, steps: range, ledger: SkipLedger = NO_SKIPS) -> list[tuple[str, int, int]]:
    return [sample for step in steps for sample in sampler.ids(step, ledger).to_list()]


def _epochs(order: list[tuple[str, int, int]], name: str) -> list[list[int]]:
    """The samples of one source, in the order in which each epoch visits them."""
    epochs: dict[int, list[int]] = {}
    for source, epoch, sample in order:
        if source == name:
            epochs.setdefault(epoch, []).append(sample)
    return [epochs[epoch] for epoch in sorted(epochs)]


def test_p39_an_epoch_visits_each_sample_once_and_epochs_differ() -> None:
    sampler = sampler_of({"only": source_of(1024)}, sequences=64)
    epochs = _epochs(_order(sampler, range(64)), "only")  # 4,096 draws: four epochs
    assert [sorted(epoch) for epoch in epochs] == [list(range(1024))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(1024)) not in epochs


def test_every_source_of_a_mixture_has_epochs_of_its_own() -> None:
    sources = {"few": source_of(100, 1), "many": source_of(700, 2)}
    order = _order(sampler_of(sources, sequences=64), range(64))  # one block of draws: 2,048 of each source
    for name, size, num_whole in (("few", 100, 20), ("many", 700, 2)):
        epochs = _epochs(order, name)
        assert len(epochs) == num_whole + 1
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs[:num_whole])
        times = [epoch for source, epoch, _ in order if source == name]
        assert times == sorted(times)  # one epoch after another
    assert Counter(name for name, _, _ in order) == {"few": 2048, "many": 2048}


def test_p03_a_resume_inside_a_later_epoch_reads_what_the_run_would_have_read() -> None:
    sources = {"few": source_of(60, 1), "many": source_of(700, 2)}
    straight = [sampler_of(sources).ids(step, NO_SKIPS).to_list() for step in range(40)]
    assert max(epoch for name, epoch, _ in straight[20] if name == "few") >= 3
    for start in (1, 20, 33):  # a new process each time: nothing but the step is known to it
        resumed = sampler_of(sources)
        assert [resumed.ids(step, NO_SKIPS).to_list() for step in range(start, 40)] == straight[start:]


def test_p03_no_offset_of_a_resume_is_left_in_later_epochs() -> None:
    """The epochs during and after a resume are whole: their first part is read too."""
    sources = {"few": source_of(100, 1), "many": source_of(700, 2)}
    for resume in (1, 20, 63, 64, 65, 100):
        before = _order(sampler_of(sources, sequences=64), range(resume))
        after = _order(sampler_of(sources, sequences=64), range(resume, 128))
        for name, size in (("few", 100), ("many", 700)):
            epochs = _epochs(before + after, name)
            assert [sorted(epoch) for epoch in epochs[:-1]] == [list(range(size))] * (4096 // size)


def test_p06_the_work_of_finding_a_batch_does_not_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    elements: list[int] = []
    permute = mixture.permute

    def counting(index: Any, size: int, key: Any) -> Any:
        elements.append(np.asarray(index).size)
        return permute(index, size, key)

    monkeypatch.setattr(mixture, "permute", counting)
    sampler = sampler_of({"few": source_of(60, 1), "many": source_of(700, 2)}, steps=2_000_000)
    work = []
    for step in (10, 1_000_000):
        elements.clear()
        mixture._build_layout.cache_clear()
        sampler.ids(step, NO_SKIPS)
        work.append((sum(elements), mixture._build_layout.cache_info().misses))
    assert work == [(24, 1)] * 2  # the sample of each of the 24 draws, and the layout of their block


def test_the_order_of_one_phase_is_pinned() -> None:
    """Another number here means that no checkpoint continues the run that it came from."""
    sampler = sampler_of({"few": source_of(60, 1), "many": source_of(700, 2)}, sequences=8)
    ledger = NO_SKIPS.with_skip(Skip("main", 35, 50, "spike", 5, 1))
    assert {step: sampler.ids(step, ledger).to_list() for step in (0, 5, 999)} == {
        0: [
            ("many", 0, 657),
            ("many", 0, 558),
            ("few", 0, 13),
            ("many", 0, 226),
            ("many", 0, 76),
            ("few", 0, 6),
            ("many", 0, 363),
            ("many", 0, 169),
        ],
        5: [
            ("few", 0, 57),
            ("many", 0, 590),
            ("many", 0, 622),
            ("few", 0, 29),
            ("few", 0, 51),
            ("few", 0, 35),
            ("few", 0, 56),
            ("many", 0, 682),
        ],
        999: [
            ("few", 66, 22),
            ("many", 5, 63),
            ("few", 66, 29),
            ("many", 5, 546),
            ("few", 66, 48),
            ("few", 66, 54),
            ("few", 66, 10),
            ("few", 66, 21),
        ],
    }


def test_another_seed_is_another_order_of_the_same_samples() -> None:
    sources = {"only": source_of(1024)}
    first, second = (_order(sampler_of(sources, 64, seed=seed), range(64)) for seed in (7, 8))
    assert first != second
    assert sorted(first) == sorted(second)


def test_skipped_draws_are_never_read_and_the_others_keep_their_order() -> None:
    sampler = sampler_of({"few": source_of(60, 1), "many": source_of(700, 2)}, sequences=10)
    ledger = NO_SKIPS.with_skip(Skip("main", 35, 50, "spike", 5, 1)).with_skip(Skip("other", 0, 9, "x", 5, 1))
    straight, skipping = _order(sampler, range(12)), _order(sampler, range(10), ledger)
    assert skipping == straight[:35] + straight[50:115]


def test_the_draws_that_a_ledger_skips_can_be_named_and_are_what_the_run_would_have_read() -> None:
    sampler = sampler_of({"few": source_of(60, 1), "many": source_of(700, 2)}, sequences=10)
    straight = _order(sampler, range(12))
    skipped = sampler.at_draws("main", sampler.timeline.at(0).seq_len, np.arange(35, 50, dtype=np.uint64), 3)
    assert skipped.to_list() == straight[35:50]
    assert (skipped.step, skipped.draw.tolist()) == (3, list(range(35, 50)))


def test_a_step_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="step 1000 lies outside the run's 1000 steps"):
        sampler_of({"only": source_of(60)}).ids(1000, NO_SKIPS)


def test_where_a_phase_begins_is_worked_out_once_and_little_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases: list[Phase] = [(f"phase {number}", 4, [(5, 8)]) for number in range(6)]
    sources = {"a": source_of(100, 1), "b": source_of(60, 2)}
    weights = {name: {"a": 1.0, "b": 1.0} for name, _, _ in phases}
    ledgers = [SkipLedger((Skip("phase 1", 3, 3 + n, "spike", 7, 1),)) for n in range(1, 40)]
    expected = [make_sampler(7, timeline(phases), weights, sources).ids(25, one).to_list() for one in ledgers]
    assert expected[0] != expected[1]
    sampler = make_sampler(7, timeline(phases), weights, sources)
    walks: list[tuple[str, SkipLedger]] = []
    walked = Sampler._walked

    def counting(self: Sampler, phase: str, ledger: SkipLedger) -> Any:
        walks.append((phase, ledger))
        return walked(self, phase, ledger)

    monkeypatch.setattr(Sampler, "_walked", counting)
    for step in (25, 26, 27, 3, 25):
        sampler.ids(step, ledgers[0])
    assert walks == [("phase 5", ledgers[0]), ("phase 0", ledgers[0])]
    assert [sampler.ids(25, ledger).to_list() for ledger in ledgers] == expected
    assert len(sampler._starts) <= 16
    assert sampler.ids(25, ledgers[0]).to_list() == expected[0]  # forgotten, and worked out again
    assert make_sampler(7, timeline(phases), weights, sources)._starts == {}
