"""What a run directory says of skips and starts, before it is trusted: types and bounds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ds_pretrain.config.timeline import Timeline
from ds_pretrain.core.state import Rollback, RunState, Skip, SkipLedger
from ds_pretrain.training.record import RunRecord

_MOST_RUNS = 10  # so many runs' samples: a plan may have been longer once


def record_problems(record: RunRecord) -> Iterator[str]:
    """What of a run.json is not what a start writes there."""
    sources = record.identity.get("sources", {}) if isinstance(record.identity, Mapping) else None
    if not isinstance(sources, Mapping):
        yield f"identity is {str(record.identity)[:80]}; expected what the run was started with"
    if not all(isinstance(word, str) for word in record.overrides):
        yield f"overrides are {list(record.overrides)}; expected a list of texts"
    if type(record.num_inherited) is not int or record.num_inherited < 0:
        yield f"num_inherited is {record.num_inherited!r}; expected a number of rollbacks"


def ledger_problems(ledger: SkipLedger, timeline: Timeline) -> Iterator[str]:
    """Skips that cannot be of this run: of a phase that it lacks, or of draws that it never comes to."""
    phases = list(dict.fromkeys(segment.phase for segment in timeline.segments))
    room = _MOST_RUNS * timeline.samples_before(timeline.last_step)
    for number, skip in enumerate(ledger.skips, 1):
        if skip.phase not in phases:
            yield f"skip {number} is of phase {skip.phase!r}; expected one of {', '.join(phases)}"
        elif skip.stop > room:
            yield (
                f"skip {number} ends with draw {skip.stop:,}; expected one that the run comes to, which has "
                f"{timeline.samples_before(timeline.last_step):,} samples in all"
            )
        else:
            room += skip.stop - skip.start


def is_typed(state: RunState) -> bool:
    """Whether the numbers and texts of a checkpoint's state are such."""
    parts: Sequence[Rollback | Skip] = (*state.rollbacks, *state.ledger.skips)
    return type(state.step) is int and state.step >= 0 and all(_is_made_well(part) for part in parts)


def _is_made_well(one: Any) -> bool:
    return all(type(getattr(one, part.name)) is part.type for part in fields(one))


def steps_of_skip(skip: Skip, before: SkipLedger, timeline: Timeline) -> tuple[int, int]:
    """The first and the last step that would have read a skip's draws under the ledger before it."""
    ends = []
    for draw in (skip.start, skip.stop - 1):
        merged = before.merged(skip.phase)
        trained = draw - sum(min(stop, draw) - start for start, stop in merged if start < draw)
        segments = [s for s in timeline.segments if s.phase == skip.phase]
        segment = [s for s in segments if s.first_draw <= trained][-1]
        ends.append(segment.first_step + (trained - segment.first_draw) // segment.sequences + 1)
    return ends[0], ends[1]
