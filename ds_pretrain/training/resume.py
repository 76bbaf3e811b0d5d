"""Where a start begins: at its run's own checkpoint, at that of another, or at step 0."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from ds_pretrain.checkpoint import restore as store
from ds_pretrain.checkpoint.verify import Found
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import World
from ds_pretrain.core.errors import InputError, agreed
from ds_pretrain.core.state import RunState
from ds_pretrain.data.loader import Feed
from ds_pretrain.engine.engine import Engine
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.monitor.sinks import say
from ds_pretrain.training.identity import with_unit
from ds_pretrain.training.known_run import KnownRun
from ds_pretrain.training.probing import check_probe
from ds_pretrain.training.record import RunRecord
from ds_pretrain.training.stages import Stages


@dataclass(frozen=True)
class Wish:
    """What the command line asks of one start, and no run file says."""

    stop_after: int | None = None  # this step ends the start as a request to stop would
    trust_pickle: bool = False  # open a checkpoint at `resume_from` that has no manifest


NO_WISH = Wish()


def known_run(found: Found | None) -> KnownRun | None:
    """What a checkpoint says of its run."""
    return None if found is None else KnownRun.of(found.folder, found.manifest, found.state)


def origin_of(plan: Plan, wish: Wish, world: World, tell: Callable[[str], None]) -> Found | None:
    """The checkpoint that a run without any of its own begins from, if its run file names one. Collective."""
    if plan.run.resume_from is None:
        return None
    accepted = (*plan.run.accept_missing, *(("manifest",) if wish.trust_pickle else ()))
    return store.elsewhere(Path(plan.run.resume_from), accepted, world, tell)


def resume(
    found: Found | None,
    engine: Engine,
    stages: Stages,
    feed: Feed,
    plan: Plan,
    monitor: Monitor,
    began: float,
    world: World,
    tell: Callable[[str], None],
) -> RunState:
    """Load what was found, or begin at step 0; `began` is when this start did. Collective."""
    if found is None:
        monitor.event("start", step=0, world_size=world.size, **plan.sharing)
        return RunState()
    state = store.restore(found, engine, plan.run.seed, world, tell)
    if found.manifest.probe is not None:
        stages.enter(found.manifest.probe.step)
    probed = check_probe(found.manifest, state, engine, feed, plan, world)
    if world.is_main:
        say(
            sys.stdout,
            f"resumed    {found.folder}: {state.step:,} of {plan.last_step:,} steps done; {probed}",
        )
    monitor.event(
        "resume",
        step=state.step,
        tokens=plan.timeline.tokens_before(state.step),
        world_size=world.size,
        **plan.sharing,
        checkpoint=found.folder.name,
        probe=probed,
        restore_seconds=perf_counter() - began,
    )
    return state


def tell_changes(record: RunRecord, monitor: Monitor, tell: Callable[[object], None]) -> None:
    """What of the plan is another than at the start before: accepted, or still ahead."""
    for change in record.changes:
        if change["attempt"] == record.attempt:
            field, old, new = (change[key] for key in ("field", "old", "new"))
            now, before = with_unit(field, new), with_unit(field, old)
            tell(f"`{field}` is {now} from this start on; it was {before}")
            monitor.event("changed", field=field, old=before, new=now)


def refuse_step(found: Found | None, plan: Plan, wish: Wish) -> None:
    """What a start cannot mean by where the run stands."""
    stands = 0 if found is None else found.state.step
    if found is not None and stands > plan.last_step:
        raise agreed(
            InputError(
                f"{found.folder} stands at step {stands:,}, past the end of the schedule ({plan.last_step:,} "
                "steps); set schedule.length back, or give the run file a new `out`"
            )
        )
    if wish.stop_after is not None and not stands < wish.stop_after <= plan.last_step:
        raise agreed(
            InputError(
                f"--stop-after {wish.stop_after}: the run stands at step {stands:,} of {plan.last_step:,}; "
                "give a step that is still to come"
            )
        )
