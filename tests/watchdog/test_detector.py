"""The watchdog's judgement: each kind of trouble, its onset and message, and what holds of all."""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from ds_pretrain.config.schema import WatchdogSection
from ds_pretrain.core.jsonl import read_as
from ds_pretrain.core.metrics import StepRecord
from ds_pretrain.core.state import RunningStats, Verdict, WatchdogState
from ds_pretrain.watchdog.backtest import Point
from ds_pretrain.watchdog.detector import GUESSING, OK, judge, norm_limit
from ds_pretrain.watchdog.stats import MOST_BLOCKS, compute_score, count_block, count_recent
from tests.watchdog.curves import (
    BEFORE,
    DEFAULTS,
    LEVEL,
    NEXT,
    NORM,
    NUM_HEALTHY,
    SPREAD,
    after,
    broken,
    first_roll_back,
    healthy,
    judged,
    raised,
    said,
)

# Kinds


def test_a_healthy_run_is_told_nothing() -> None:
    assert said(healthy(2000)) == []


def test_a_high_loss_is_watched_at_once_and_a_single_one_is_a_blip_when_two_usual_ones_follow() -> None:
    points = [*BEFORE, *raised(after(BEFORE, 1), 100 * SPREAD)]
    [(step, high), (healed_step, healed)] = said([*points, *after(points, 50)])
    assert (step, high.action, high.kind, high.onset) == (NEXT, "watch", "spike", NEXT)
    assert high.message.startswith("loss 7.0")
    assert high.message.endswith(f"since step {NEXT}")
    assert (healed_step, healed.action, healed.kind, healed.onset) == (NEXT + 2, "ok", "blip", NEXT)
    assert healed.message == f"one-step blip at step {NEXT}"


def test_a_spike_that_heals_within_its_patience_is_watched_and_told_healed() -> None:
    points = [*BEFORE, *raised(after(BEFORE, DEFAULTS.patience - 1), 0.5)]
    verdicts = said([*points, *after(points, 100)])
    assert {v.action for _, v in verdicts} == {"watch", "ok"}
    assert verdicts[-1][1].message == f"spike of 29 steps at step {NEXT} has healed"
    assert verdicts[-1][1].kind == "spike"


def test_a_spike_that_outlives_its_patience_is_rolled_back_from_where_it_began() -> None:
    step, verdict = first_roll_back([*BEFORE, *raised(after(BEFORE, 50), 0.5)])
    assert (verdict.kind, verdict.onset) == ("lasting_spike", NEXT)
    assert step == NEXT + DEFAULTS.patience - 1
    assert verdict.message.endswith(f"since step {NEXT}, and did not heal within 30 steps")
    assert "(highest rank " in verdict.message


def test_a_spike_begins_where_the_loss_left_the_usual_not_where_it_passed_the_threshold() -> None:
    climb = [2, 3, 4, 5, *(20 + 0.1 * (t % 3) for t in range(40))]  # spreads
    points = [
        replace(p, loss=LEVEL + s * SPREAD, loss_max_rank=LEVEL + s * SPREAD)
        for p, s in zip(after(BEFORE, 44), climb, strict=True)
    ]
    quiet = [replace(p, loss=LEVEL - SPREAD * (-1) ** p.step, loss_max_rank=LEVEL) for p in BEFORE]
    _, verdict = first_roll_back([*quiet, *points])
    assert verdict.onset == NEXT


def test_one_usual_loss_in_the_midst_of_a_jump_does_not_end_it() -> None:
    jump = raised(after(BEFORE, 40), 0.5)
    jump[10] = after(BEFORE, 11)[10]
    step, verdict = first_roll_back([*BEFORE, *jump])
    assert (step, verdict.onset) == (NEXT + DEFAULTS.patience - 1, NEXT)


def test_a_norm_that_climbs_is_watched_before_the_loss_moves() -> None:
    norms = [0.9, 2.4, 16.0, 145.0, 960.0]
    climbing = [replace(p, grad_norm=norm) for p, norm in zip(after(BEFORE, 5), norms, strict=True)]
    [(step, verdict), *_] = said([*BEFORE, *climbing])
    assert (step, verdict.action, verdict.kind) == (NEXT, "watch", "norm_rise")
    assert verdict.onset in range(NEXT - 2, NEXT + 1)  # two norms before it were a little high by chance
    assert verdict.message.startswith("gradient norm 0.9 is ")
    assert verdict.message.endswith(f"since step {verdict.onset}; the loss has not moved")


def test_a_norm_alone_is_never_rolled_back_and_becomes_the_new_usual_after_a_window() -> None:
    high = [replace(p, grad_norm=10 * NORM) for p in after(BEFORE, 2)]
    chance = random.Random(3)
    lasting = [
        replace(p, grad_norm=10 * NORM * math.exp(0.06 * chance.gauss(0, 1)))
        for p in after(BEFORE, 2 * DEFAULTS.window)
    ]
    assert {v.action for _, v in said([*BEFORE, *high])} == {"watch"}
    steps = [step for step, v in said([*BEFORE, *lasting])]
    assert steps == list(range(NEXT, steps[-1] + 1))
    assert steps[-1] in range(NEXT + DEFAULTS.window - 6, NEXT + DEFAULTS.window)  # by its onset


@pytest.mark.parametrize("share", [0.0003, 0.0005, 0.001])
def test_a_slow_rise_is_a_drift_that_is_watched_and_then_rolled_back(share: float) -> None:
    rising = [q for t, p in enumerate(after(BEFORE, 400)) for q in raised([p], p.loss * share * t)]
    verdicts = said([*BEFORE, *rising])
    step, verdict = next((s, v) for s, v in verdicts if v.interrupts)
    assert verdict.kind == "drift"
    assert verdict.onset is not None
    assert abs(verdict.onset - NEXT) <= 100
    assert share * (step - NEXT) < 0.15
    assert verdicts[0][1].action == "watch"
    assert re.match(
        r"the mean of the last 30 losses rose from [23]\.\d+ to 3\.\d+ \(\d\.\d sigmas\), "
        rf"since about step {verdict.onset}$",
        verdict.message,
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0])
def test_a_streak_of_losses_that_are_no_numbers_is_rolled_back_once(loss: float) -> None:
    verdicts = said([*BEFORE, *broken(after(BEFORE, 60), loss, NORM)])
    assert [step for step, v in verdicts if v.interrupts] == [NEXT + DEFAULTS.max_non_finite_steps - 1]
    assert {v.kind for _, v in verdicts} == {"non_finite"}
    assert {v.onset for _, v in verdicts} == {NEXT}
    assert verdicts[0][1].message == (
        f"loss {loss:g} (highest rank {loss:g}), gradient norm 0.3: not finite, 1 in a row since step {NEXT}"
    )


@pytest.mark.parametrize("norm", [None, math.nan, math.inf, -1.0])
def test_a_norm_that_is_no_number_counts_as_not_finite_though_the_loss_is_fine(norm: float | None) -> None:
    points = [*BEFORE, *broken(after(BEFORE, 20), LEVEL, norm)]
    step, verdict = first_roll_back(points)
    assert (step, verdict.kind, verdict.onset) == (NEXT + 19, "non_finite", NEXT)
    shown = "none" if norm is None else f"{norm:g}"
    assert f"gradient norm {shown}: not finite, 20 in a row" in verdict.message


def test_a_loss_of_one_rank_that_is_no_number_is_not_finite() -> None:
    point = replace(after(BEFORE, 1)[0], loss_max_rank=math.inf)
    [(_, verdict)] = said([*BEFORE, point])
    assert (verdict.action, verdict.kind) == ("watch", "non_finite")


def test_an_update_that_was_applied_though_not_finite_is_said() -> None:
    point = replace(broken(after(BEFORE, 1))[0], update_applied=True)
    [(_, verdict)] = said([*BEFORE, point])
    assert verdict.message.endswith("; the update was applied, so the weights may be damaged")


def test_a_run_that_is_not_finite_from_its_first_step_is_rolled_back() -> None:
    step, verdict = first_roll_back(broken(healthy(50)))
    assert (step, verdict.kind, verdict.onset) == (20, "non_finite", 1)


def test_the_same_norm_again_and_again_is_watched_and_then_rolled_back() -> None:
    frozen = [replace(p, grad_norm=0.25) for p in after(BEFORE, 40)]
    verdicts = said([*BEFORE, *frozen])
    step, verdict = next((s, v) for s, v in verdicts if v.interrupts)
    assert verdicts[0][0] == NEXT + 15
    assert verdicts[0][1].action == "watch"
    assert (step, verdict.kind, verdict.onset) == (NEXT + 30, "frozen_norm", NEXT + 1)
    assert verdict.message == f"the gradient norm has been exactly 0.25 for 30 steps, since step {NEXT + 1}"


def test_a_norm_of_zero_has_no_logarithm_and_is_judged_all_the_same() -> None:
    zero = [replace(p, grad_norm=0.0) for p in after(BEFORE, 40)]
    assert first_roll_back([*BEFORE, *zero])[1].kind == "frozen_norm"


def test_a_loss_that_falls_at_once_is_watched_and_becomes_the_new_usual() -> None:
    fallen = after(BEFORE, 400, level=LEVEL - 0.5)
    verdicts = said([*BEFORE, *fallen])
    assert [step for step, _ in verdicts] == list(range(NEXT, NEXT + DEFAULTS.patience))
    assert {(v.action, v.kind, v.onset) for _, v in verdicts} == {("watch", "fall", NEXT)}
    assert verdicts[0][1].message.endswith("too easy or repeated data, or a change of rate?")


def test_a_loss_that_comes_back_from_a_fall_is_no_fault_but_one_that_overshoots_is() -> None:
    fallen = [*BEFORE, *after(BEFORE, 150, level=LEVEL - 0.5)]
    _, last = said([*fallen, *after(fallen, 100, 2)])[-1]
    assert (last.action, last.kind) == ("watch", "fall")
    assert re.fullmatch(
        r"loss 2\.9\d+ is back near the 3\.0\d* that it had before a fall: what was too easy is over",
        last.message,
    )
    assert not any(v.interrupts for _, v in said([*fallen, *after(fallen, 400, 2)]))
    assert first_roll_back([*fallen, *after(fallen, 100, 2, LEVEL + 0.5)])[1].kind == "lasting_spike"


def test_a_loss_that_comes_back_before_the_new_level_is_known_is_no_drift() -> None:
    fallen = [*BEFORE, *after(BEFORE, 70, level=LEVEL - 0.5)]
    assert not any(v.interrupts for _, v in said([*fallen, *after(fallen, 400, 2)]))


def test_a_fall_long_ago_excuses_nothing() -> None:
    window = WatchdogSection(window=40)
    fallen = [*BEFORE, *after(BEFORE, MOST_BLOCKS * count_block(40) + 50, level=LEVEL - 0.5)]
    verdict = first_roll_back([*fallen, *after(fallen, 100, 2)], window)[1]
    assert verdict.kind == "lasting_spike"


def test_a_loss_above_that_of_guessing_is_rolled_back_from_the_start_on() -> None:
    step, verdict = first_roll_back(healthy(50, level=18.0))
    assert (step, verdict.kind, verdict.onset) == (30, "worse_than_guessing", 1)
    assert "above ln(1,000,000) = 13.8 since step 1: worse than guessing" in verdict.message
    start = [*healthy(29, level=18.0), *healthy(60, 30, level=GUESSING - 1)]
    assert not any(v.interrupts for _, v in said(start))


# Warm-up, phases, floors


def test_nothing_is_judged_before_a_quarter_of_the_window_is_known() -> None:
    start = healthy(50)
    wild = raised(after(start, 1), 5.0)
    assert said([*start[:49], *raised(start[49:50], 5.0)]) == []
    assert [v.kind for _, v in said([*start, *after(start, 1), *raised(after(start, 2)[1:], 5.0)])] == [
        "spike"
    ]
    assert wild[0].loss > 7


def test_a_level_shift_at_a_change_of_phase_is_expected() -> None:
    shifted = [replace(p, phase="anneal") for p in raised(after(BEFORE, 300), 1.0)]
    assert said([*BEFORE, *shifted]) == []
    assert first_roll_back([*BEFORE, *raised(after(BEFORE, 300), 1.0)])[1].kind == "lasting_spike"


def test_a_spike_in_the_new_phase_is_judged_by_the_new_phase() -> None:
    shifted = [replace(p, phase="anneal") for p in raised(after(BEFORE, 100), 1.0)]
    jump = [replace(p, phase="anneal") for p in raised(after(shifted, 40), 1.5)]
    _, verdict = first_roll_back([*BEFORE, *shifted, *jump])
    assert verdict.onset == NEXT + 100


def test_a_very_quiet_run_is_not_judged_by_its_own_spread() -> None:
    def at(level: float, points: Sequence[Point]) -> list[Point]:
        losses = [level + 1e-6 * (p.step % 5) for p in points]
        return [replace(p, loss=x, loss_max_rank=x) for p, x in zip(points, losses, strict=True)]

    quiet = at(2.0, BEFORE)
    small, large = at(2.02, after(quiet, 60)), at(2.03, after(quiet, 60))
    assert said([*quiet, *small]) == []
    assert first_roll_back([*quiet, *large])[1].kind == "lasting_spike"


def test_a_loss_that_falls_fast_is_not_a_fall_and_its_noise_no_spike() -> None:
    falling = [
        replace(p, loss=p.loss + 8 * math.exp(-t / 60), loss_max_rank=9.0)
        for t, p in enumerate(healthy(1000))
    ]
    assert said(falling) == []


def test_a_steep_fall_that_ends_is_no_spike() -> None:
    chance = random.Random(0)
    losses = [6 - 0.01 * min(t, 300) + 0.01 * chance.gauss(0, 1) for t in range(600)]
    points = [replace(p, loss=x, loss_max_rank=x) for p, x in zip(healthy(600), losses, strict=True)]
    assert not any(v.interrupts for _, v in said(points))


def test_a_value_in_a_falling_series_is_measured_from_where_it_would_have_fallen_to() -> None:
    usual = RunningStats(
        recent=(3.0, 3.0), residuals=(-0.1, -0.1), num_accepted=2, trend=-0.1, mad_sigma=0.02
    )
    assert compute_score(usual, 2.9, 0.01) == pytest.approx(0, abs=1e-9)
    assert compute_score(usual, 2.8, 0.01) == pytest.approx(-5)
    assert compute_score(usual, 3.1, 0.01) == pytest.approx(10)
    assert compute_score(usual, 3.1, 0.1) == pytest.approx(2)
    assert compute_score(usual, 3.02, 0.01) == pytest.approx(
        2
    )  # twice as far as it is above the centre, no more


def test_a_noisy_run_drifts_by_its_spreads_and_not_by_its_share_alone() -> None:
    chance = random.Random(2)
    noisy = [replace(p, loss=0.1 + 0.02 * chance.gauss(0, 1)) for p in healthy(5000)]
    assert not any(v.interrupts for _, v in said(noisy))


def test_a_steady_norm_is_not_judged_by_its_own_spread() -> None:
    steady = [replace(p, grad_norm=NORM + 1e-5 * (p.step % 7)) for p in BEFORE]
    for norm, num_said in ((1.3 * NORM, 0), (1.6 * NORM, 1)):
        assert len(said([*steady, replace(after(BEFORE, 1)[0], grad_norm=norm)])) == num_said


def test_an_onset_lies_at_most_five_steps_before_the_threshold_was_passed() -> None:
    bump = [replace(p, loss=LEVEL + 2.5 * SPREAD) for p in after(BEFORE, 12)]
    points = [*BEFORE, *bump]
    _, verdict = first_roll_back([*points, *raised(after(points, 40), 0.5)])
    assert verdict.onset == NEXT + 12 - 5


def test_a_curve_without_norms_is_judged_by_its_losses() -> None:
    bare = [replace(p, grad_norm=None, has_norm=False) for p in [*BEFORE, *raised(after(BEFORE, 40), 0.5)]]
    assert first_roll_back(bare)[1].kind == "lasting_spike"
    assert said(bare[:NUM_HEALTHY]) == []


def test_mode_off_judges_nothing() -> None:
    off = WatchdogSection(mode="off")
    verdicts, memory = judged([*BEFORE, *broken(after(BEFORE, 60))], off)
    assert set(verdicts) == {OK}
    assert memory == WatchdogState()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"loss_sigmas": 20.0, "drift_threshold": 0.2}, None),
        ({"patience": 60}, None),
        ({"patience": 10}, "lasting_spike"),
    ],
)
def test_settings_change_the_verdict(change: dict[str, float], kind: str | None) -> None:
    points = [*BEFORE, *raised(after(BEFORE, 35), 0.4)]
    found = [v.kind for _, v in said(points, WatchdogSection(**change)) if v.interrupts]
    assert found == ([] if kind is None else [kind] * len(found))
    assert bool(found) == (kind is not None)


def test_norm_sigmas_non_finite_and_drift_are_thresholds_too() -> None:
    norm = [*BEFORE, replace(after(BEFORE, 1)[0], grad_norm=3 * NORM)]
    assert len(said(norm)) == 1
    assert said(norm, WatchdogSection(norm_sigmas=40.0)) == []
    bad = [*BEFORE, *broken(after(BEFORE, 5))]
    assert not any(v.interrupts for _, v in said(bad))
    assert first_roll_back(bad, WatchdogSection(max_non_finite_steps=3))[0] == NEXT + 2
    rising = [replace(p, loss=p.loss * (1 + 0.0003 * t)) for t, p in enumerate(after(BEFORE, 300))]
    assert first_roll_back([*BEFORE, *rising])[1].kind == "drift"
    assert not any(v.interrupts for _, v in said([*BEFORE, *rising], WatchdogSection(drift_threshold=0.2)))


# Dropping

DROPPING = WatchdogSection(skip_update_sigmas=20.0)


def wild(points: Sequence[Point], norm: float = 50.0) -> list[Point]:
    return [replace(p, grad_norm=norm) for p in points]


def trained(
    points: Sequence[Point], settings: WatchdogSection = DROPPING, memory: WatchdogState | None = None
) -> tuple[list[bool], list[Verdict], WatchdogState]:
    """As in a run: what is above the limit is not applied. Whether each was, its verdict, and the memory."""
    memory, applied, verdicts = memory or WatchdogState(), [], []
    for point in points:
        limit = norm_limit(settings, memory, point.phase)
        applied.append(limit is None or point.grad_norm is None or point.grad_norm <= limit)
        memory, verdict = judge(settings, memory, replace(point, update_applied=applied[-1]))
        verdicts.append(verdict)
    return applied, verdicts, memory


def test_the_limit_is_where_a_norm_lies_drop_sigmas_above_the_usual() -> None:
    _, memory = judged(BEFORE)
    for sigmas in (8.0, 20.0):
        limit = norm_limit(WatchdogSection(skip_update_sigmas=sigmas), memory, "main")
        assert limit is not None
        assert compute_score(memory.norm, math.log(limit), 0.05) == pytest.approx(sigmas)
    falling = replace(memory, norm=replace(memory.norm, trend=-3.0))
    limit = norm_limit(DROPPING, falling, "main")
    assert limit is not None
    assert compute_score(falling.norm, math.log(limit), 0.05) == pytest.approx(20.0)
    assert limit > math.exp(memory.norm.median)


def test_a_steady_norm_has_a_limit_of_so_many_times_five_percent() -> None:
    steady = [replace(p, grad_norm=NORM + 1e-5 * (p.step % 7)) for p in BEFORE]
    limit = norm_limit(DROPPING, judged(steady)[1], "main")
    assert limit == pytest.approx(NORM * math.exp(20 * 0.05), rel=1e-3)


def test_a_limit_that_no_float_can_hold_is_the_highest_that_one_can() -> None:
    assert math.isfinite(
        norm_limit(WatchdogSection(skip_update_sigmas=1e9), judged(BEFORE)[1], "main") or math.inf
    )


@pytest.mark.parametrize(
    ("settings", "points", "phase"),
    [
        (DEFAULTS, BEFORE, "main"),
        (WatchdogSection(skip_update_sigmas=20.0, mode="observe"), BEFORE, "main"),
        (WatchdogSection(skip_update_sigmas=20.0, mode="off"), BEFORE, "main"),
        (DROPPING, BEFORE[:50], "main"),
        (DROPPING, BEFORE, "the next phase"),
    ],
    ids=["not asked for", "observe", "off", "too little known", "new phase"],
)
def test_nothing_is_dropped(settings: WatchdogSection, points: list[Point], phase: str) -> None:
    _, memory = judged(points, replace_mode(settings))
    assert norm_limit(settings, memory, phase) is None
    assert norm_limit(DROPPING, judged(BEFORE[:51])[1], "main") is not None


def replace_mode(settings: WatchdogSection) -> WatchdogSection:
    """The same, but judging."""
    return settings.model_copy(update={"mode": "act"})


def test_a_single_wild_update_is_dropped_and_said_and_enters_no_statistics() -> None:
    _, before = judged(BEFORE)
    applied, [verdict], memory = trained(wild(after(BEFORE, 1)), memory=before)
    assert applied == [False]
    assert (verdict.action, verdict.kind) == ("watch", "norm_rise")
    assert verdict.onset in range(NEXT - 2, NEXT + 1)  # two norms before it were a little high by chance
    assert re.fullmatch(
        r"update skipped: gradient norm 50, \d+\.\d sigmas above the median 0\.[23]\d* "
        rf"\(watchdog\.skip_update_sigmas = 20\); high since step {verdict.onset}; weights and "
        "optimizer state are unchanged",
        verdict.message,
    )
    assert memory.norm == before.norm
    assert memory.non_finite is None
    applied, verdicts, memory = trained(after([*BEFORE, BEFORE[-1]], 30), memory=memory)
    assert all(applied)
    assert set(verdicts) == {OK}
    assert memory.norm_rise is None


def test_a_dropped_update_is_said_before_what_else_was_seen_of_it() -> None:
    _, memory = judged(BEFORE)
    _, [verdict], memory = trained(raised(wild(after(BEFORE, 1)), 2.0), memory=memory)
    assert (verdict.action, verdict.kind) == ("watch", "norm_rise")
    assert "state are unchanged; loss 5." in verdict.message
    assert memory.spike is not None
    _, verdicts, _ = trained(after([*BEFORE, BEFORE[-1]], 5), memory=memory)
    assert [v.kind for v in verdicts if v != OK] == ["blip"]


def test_an_update_that_was_dropped_before_anything_is_known_is_said_too() -> None:
    memory, verdict = judge(DEFAULTS, WatchdogState(), replace(healthy(1)[0], update_applied=False))
    assert (verdict.action, verdict.kind) == ("watch", "norm_rise")
    assert re.fullmatch(
        r"update skipped: gradient norm 0\.\d+; high since step 1; weights .* are unchanged", verdict.message
    )
    assert memory.norm == RunningStats()


def test_when_half_the_patience_was_high_in_a_row_training_goes_on_and_the_level_is_learned_anew() -> None:
    _, memory = judged(BEFORE)
    higher = [replace(p, grad_norm=5 * (p.grad_norm or 0)) for p in after(BEFORE, 400)]
    applied, verdicts, memory = trained(higher, memory=memory)
    assert 10 <= applied.index(True) <= DEFAULTS.patience // 2
    assert all(applied[applied.index(True) :])
    assert not any(v.interrupts for v in verdicts)
    assert memory.norm.median == pytest.approx(math.log(5 * NORM), abs=0.1)
    assert norm_limit(DROPPING, memory, "main") is not None


def test_in_a_spike_updates_are_dropped_for_half_its_patience_so_that_it_may_heal() -> None:
    _, memory = judged(BEFORE)
    sick = raised(wild(after(BEFORE, 25)), 0.5)
    applied, verdicts, _ = trained([*sick, *after([*BEFORE, *sick], 100, 2)], memory=memory)
    assert 10 <= applied.index(True) <= DEFAULTS.patience // 2
    assert all(applied[applied.index(True) :])
    assert not any(v.interrupts for v in verdicts)
    assert norm_limit(DROPPING, trained([*BEFORE, *sick, *after([*BEFORE, *sick], 9)])[2], "main")


def test_a_spike_that_lasts_is_rolled_back_for_though_updates_were_dropped() -> None:
    _, memory = judged(BEFORE)
    _, verdicts, _ = trained(raised(wild(after(BEFORE, 40)), 0.5), memory=memory)
    assert [v.kind for v in verdicts if v.interrupts] == ["lasting_spike"]


def test_a_loss_that_is_no_number_is_a_streak_though_the_update_was_dropped_for_its_norm() -> None:
    _, memory = judged(BEFORE)
    bad = replace(after(BEFORE, 1)[0], loss=math.nan, grad_norm=50.0, update_applied=False)
    assert judge(DROPPING, memory, bad)[1].kind == "non_finite"


# Properties of the machine


def eventful() -> list[Point]:
    """Every kind of trouble, one behind the other."""
    points = healthy()
    for piece in (
        raised(after(points, 3), 2.0),
        broken(after(points, 5)),
        [replace(p, grad_norm=9.0) for p in after(points, 5)],
        [replace(p, grad_norm=0.2) for p in after(points, 20)],
        after(points, 50, level=LEVEL - 0.5),
        raised(after(points, 10), 20.0),
        [replace(p, loss=2.0, loss_max_rank=2.0) for p in after(points, 20)],
        [replace(p, loss_max_rank=p.loss + 2.0) for p in after(points, 20)],
        [replace(p, loss=p.loss * (1 + 0.001 * max(0, t - 200))) for t, p in enumerate(after(points, 350))],
        [replace(p, phase="next") for p in after(points, 100)],
    ):
        points += [replace(p, step=points[-1].step + 1 + t) for t, p in enumerate(piece)]
        points += after(points, 60, seed=len(points))
    return points


def test_memory_that_goes_through_text_at_every_step_judges_the_same() -> None:
    points = eventful()
    straight, _ = judged(points)
    assert len({v.kind for v in straight}) >= 9
    memory = WatchdogState()
    for point, expected in zip(points, straight, strict=True):
        memory, verdict = judge(DEFAULTS, memory, point)
        assert verdict == expected
        text = json.dumps(asdict(memory), allow_nan=False)
        assert read_as(WatchdogState, text) == memory
        memory = read_as(WatchdogState, text)


def test_memory_is_bounded() -> None:
    settings = WatchdogSection(window=40)
    _, early = judged(healthy(200), settings)
    _, late = judged(healthy(5000), settings)
    for memory in (early, late):
        for series in (memory.loss, memory.norm):
            assert (len(series.residuals), len(series.recent)) == (40, count_recent(40))


def test_what_is_rejected_enters_no_statistics() -> None:
    _, before = judged(BEFORE)
    bad = [
        *raised(after(BEFORE, 5), 5.0),
        *broken(after(BEFORE, 5)),
        *broken(after(BEFORE, 5), LEVEL, math.inf),
    ]
    for point in bad:
        _, memory = judged([replace(point, step=NEXT)], memory=before)
        assert (memory.loss, memory.norm) == (before.loss, before.norm)
        assert memory.slow_level == before.slow_level
    low = replace(after(BEFORE, 1)[0], loss=1.0)
    assert judged([low], memory=before)[1].loss == before.loss
    high_norm = replace(after(BEFORE, 1)[0], grad_norm=50.0)
    _, memory = judged([high_norm], memory=before)
    assert memory.norm == before.norm
    assert memory.loss != before.loss


def test_whoever_goes_on_after_a_roll_back_starts_afresh() -> None:
    points = [*BEFORE, *raised(after(BEFORE, DEFAULTS.patience), 0.5)]
    _, memory = judged(points)
    assert memory == WatchdogState(step=points[-1].step, phase="main")


def test_a_step_record_can_be_judged() -> None:
    record = StepRecord(
        **dict.fromkeys(StepRecord.__dataclass_fields__, 0)
        | {"step": 1, "phase": "main", "loss": 3.0, "loss_max_rank": 3.1, "grad_norm": None}
        | {"update_applied": False}
    )
    _, verdict = judge(DEFAULTS, WatchdogState(), record)
    assert verdict.kind == "non_finite"


# Field problems


def bloom(num_high: int) -> list[Point]:
    """The norm goes from 0.24 to 960, then the loss from 2.2 to 5.1, and back within `num_high` steps.

    As in https://github.com/bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md, 2022-04-12.
    """
    points = healthy(level=2.2)
    points = [replace(p, loss=2.2 + (p.loss - 2.2) / 3, loss_max_rank=2.2) for p in points]
    norms = (0.24, 0.9, 2.4, 16.0, 145.0, 960.0)
    climb = [replace(p, grad_norm=n) for p, n in zip(after(points, 6, level=2.2), norms, strict=True)]
    start = [*points, *climb]
    spike = [
        replace(p, loss=2.2 + 2.9 * math.exp(-3 * t / num_high), grad_norm=50.0 - t)
        for t, p in enumerate(after(start, num_high))
    ]
    return [*start, *spike, *after([*start, *spike], 200, level=2.2)]


def test_p56_a_spike_with_a_norm_of_960_that_heals_within_30_steps_is_only_watched() -> None:
    verdicts = said(bloom(27))
    assert {v.action for _, v in verdicts} <= {"watch", "ok"}
    assert verdicts[0][1].kind == "norm_rise"
    assert verdicts[0][0] < NEXT + 6  # before the loss moved
    assert any(v.kind == "spike" and v.action == "ok" for _, v in verdicts)


def test_p56_a_sustained_rise_and_a_streak_of_nan_are_rolled_back() -> None:
    assert first_roll_back([*BEFORE, *raised(after(BEFORE, 40), 2.9)])[1].kind == "lasting_spike"
    assert first_roll_back([*BEFORE, *broken(after(BEFORE, 40))])[1].kind == "non_finite"


def test_p56_a_norm_that_drifts_without_the_loss_warns() -> None:
    drifting = [replace(p, grad_norm=NORM * 1.05**t) for t, p in enumerate(after(BEFORE, 100))]
    verdicts = said([*BEFORE, *drifting])
    assert {(v.action, v.kind) for _, v in verdicts} == {("watch", "norm_rise")}
