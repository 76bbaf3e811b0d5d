"""The loop, and the module that the deepspeed launcher starts on every rank.

deepspeed [--hostfile F] --module ds_pretrain.train RUN.toml [section.key=value ...] [--stop-after STEP] ...
"""

import argparse
import os
import platform
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch.distributed as dist

from ds_pretrain.checkpoint import restore as store
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import World, barrier, on_main
from ds_pretrain.core.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NEEDS_PERSON,
    InputError,
    NeedsPerson,
    NoProgress,
    Preempted,
    RunError,
    agreed,
)
from ds_pretrain.core.run_files import record_exit, record_rank
from ds_pretrain.core.run_lock import RunLock
from ds_pretrain.core.state import RunState
from ds_pretrain.core.stop import StopSignal
from ds_pretrain.core.text import say
from ds_pretrain.data.loader import Feed
from ds_pretrain.data.usage import read_so_far
from ds_pretrain.data.validation_set import ValidationSet
from ds_pretrain.engine.engine import Engine, initialize_distributed
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.compatibility import claim
from ds_pretrain.training.curriculum import skipped_lines
from ds_pretrain.training.resume import (
    NO_WISH,
    Wish,
    known_run,
    origin_of,
    probe_again,
    refuse_step,
    resume,
    tell_changes,
)
from ds_pretrain.training.rollback import Watchdog
from ds_pretrain.training.run_places import label_place, open_places, require_shared_folder
from ds_pretrain.training.saver import PATIENCE_SECONDS as SHIP_PATIENCE_SECONDS
from ds_pretrain.training.saver import STOP_PATIENCE_SECONDS, Saver, Shipping
from ds_pretrain.training.setup import (
    announce,
    open_feed,
    open_monitor,
    open_run_engine,
    open_stages,
    prepare_inputs,
    validation_sets,
)
from ds_pretrain.training.stages import Stages
from ds_pretrain.training.step import measure, take_step
from ds_pretrain.training.validation import evaluate
from ds_pretrain.watchdog.rollback_log import note_told, read_cure


def train(plan: Plan, world: World, stop: StopSignal, lock: RunLock, wish: Wish = NO_WISH) -> None:
    """Train to the last step, surviving preemption: the run goes on where its newest checkpoint stands.

    Raises:
        InputError: something that a person has to change; found before the run directory is touched.
        Preempted: asked to stop; everything is saved.
        NoProgress: every update of this start was dropped.
    """
    began, tell = perf_counter(), _tell(world)
    inputs = prepare_inputs(plan, world)
    on_main(world, lock.take)
    require_shared_folder(plan.out, world)
    places = open_places(plan, world)
    cure = on_main(world, lambda: read_cure(plan.out))
    if cure.untold is not None:
        raise agreed(NeedsPerson(f"{cure.untold}\n(the run died before it could end with this; it does now)"))
    is_left = partial(cure.abandons, heeds_stop=plan.run.watchdog.mode == "act")
    own = store.find(places, world, tell, is_left)
    found = own or origin_of(plan, wish, world, tell)
    refuse_step(found, plan, wish)
    origin = None if own is not None else known_run(found)
    record = on_main(world, lambda: claim(plan, inputs.data, known_run(own), origin))
    on_main(world, lambda: label_place(places, record))
    if own is not None and cure.rollbacks:
        store.leave(places, own.state.step, world, tell)
    announce(plan, inputs, world)
    record_rank(plan.out, world.rank)
    shipping = Shipping(plan, places, world, tell)
    if found is not None and found.state.step == plan.last_step:
        _nothing_left(plan, shipping, world)
        return
    found = found and store.fitted(found, plan.deepspeed, places, world, tell)
    engine = open_run_engine(plan, world, inputs.base)
    stages = open_stages(plan, engine, world)
    with ExitStack() as stack:
        monitor = stack.enter_context(open_monitor(plan, record, world))
        feed = stack.enter_context(open_feed(plan, inputs, world))
        tell_changes(record, monitor, tell)
        state = cure.applied(resume(found, engine, stages, feed, plan, monitor, began, world, tell))
        for line in skipped_lines(plan, inputs.sources, state.ledger):
            tell(line)
        restore_seconds = perf_counter() - began
        stack.enter_context(shipping)
        saver = Saver(plan, record, engine, monitor, places, shipping, restore_seconds, world, tell)
        watchdog = Watchdog(plan, monitor, places, record.attempt, stages.enter, world, tell)
        watchdog.take_up(state, engine, feed)
        parts = _Parts(
            plan,
            engine,
            stages,
            feed,
            monitor,
            saver,
            watchdog,
            validation_sets(plan, inputs),
            stop,
            wish,
            world,
        )
        _train_from(state, parts)


def _nothing_left(plan: Plan, shipping: Shipping, world: World) -> None:
    with shipping:
        shipping.finish(SHIP_PATIENCE_SECONDS)
    if world.is_main:
        say(sys.stdout, f"finished   {plan.out}: all {plan.last_step:,} steps are done; nothing is left")


@dataclass(frozen=True)
class _Parts:
    """What the loop works with."""

    plan: Plan
    engine: Engine
    stages: Stages
    feed: Feed
    monitor: Monitor
    saver: Saver
    watchdog: Watchdog
    validation: Mapping[int, Sequence[ValidationSet]]  # by sequence length
    stop: StopSignal
    wish: Wish
    world: World


def _train_from(state: RunState, parts: _Parts) -> None:
    """Step by step to the last one, or to where it is asked to stop. Collective."""
    plan, engine, saver, world = parts.plan, parts.engine, parts.saver, parts.world
    num_attempted = num_applied = 0
    while state.step < plan.last_step:
        started = perf_counter()
        parts.stages.enter(state.step)
        batch = parts.feed.at(state)
        rate = plan.rate(state.step, state.num_updates)
        limit = parts.watchdog.norm_limit(state)
        losses, update = take_step(engine, batch, rate, plan.run.model.z_loss, world, limit)
        step, shared = measure(plan, state, batch, rate, losses, update, started, saver, parts.stop, world)
        parts.monitor.step(step)
        state, verdict = parts.watchdog.judge(state, step, shared.rank_losses, batch.ids)
        saver.advance(shared.stages, shared.probe if verdict.action == "ok" else None)
        probe = partial(probe_again, engine, batch, step.step - 1, world)
        if parts.watchdog.wants_back(state, verdict):
            saver.finish()
            try:
                state = parts.watchdog.roll_back(state, verdict, engine, parts.feed, step.step)
            except NeedsPerson:
                saver.save_for_person(state, probe)
                raise
            saver.gone_back(state)
            continue
        saver.note_health(state)
        num_attempted, num_applied = num_attempted + 1, num_applied + step.update_applied
        if state.step == plan.last_step and num_attempted > 1 and not num_applied:
            raise NoProgress(
                f"{num_attempted} steps were attempted and every update was dropped (gradients not "
                "finite, or wild); nothing was learned since the checkpoint that this start began from: "
                "lower schedule.peak, or check the data"
            )
        _report(state, batch.ids.seq_len, parts)
        stops = shared.stop or state.step == parts.wish.stop_after
        if stops or state.step == plan.last_step:
            saver.save_surely(state, probe)
        elif shared.save or saver.is_due(state):
            saver.save(state, probe)
        if state.step == plan.last_step:
            parts.watchdog.finish(state)
            parts.monitor.event("finish", step=state.step)
            saver.ship_rest(SHIP_PATIENCE_SECONDS)
        elif stops:
            parts.monitor.event("stop", step=state.step)
            saver.ship_rest(STOP_PATIENCE_SECONDS)
            raise Preempted(f"stopped after step {state.step:,}, saved; the same command goes on from there")


def _report(state: RunState, seq_len: int, parts: _Parts) -> None:
    """Validate when it is due and after the last step; then, and as a phase ends, say what was read.

    Collective.
    """
    plan, step, section = parts.plan, state.step, parts.plan.run.validation
    is_last = step == plan.last_step
    validates = section is not None and (is_last or section.is_due(step, plan.timeline))
    if section is not None and validates:
        sets, micro = parts.validation[seq_len], plan.micro_sequences(step - 1)
        found = evaluate(parts.engine, sets, micro, parts.world, section.retrieval)
        parts.monitor.validation(step, found.losses, found.by_position, found.retrieval)
    if validates or is_last or plan.timeline.ends_phase(step):
        read = read_so_far(parts.feed.sampler, step, state.ledger)
        sources = {name: asdict(source) for name, source in read.items()}
        parts.monitor.event("data", step=step, phase=plan.timeline.at(step - 1).phase, sources=sources)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run file named on the command line; the exit code of this rank."""
    parser = argparse.ArgumentParser(prog="python -m ds_pretrain.train")
    parser.add_argument("run_file", metavar="RUN.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--local_rank", help=argparse.SUPPRESS
    )  # the launcher adds it; LOCAL_RANK says the same
    parser.add_argument("--stop-after", type=int, metavar="STEP")
    parser.add_argument("--trust-pickle", action="store_true")
    words = parser.parse_intermixed_args(argv)
    wish = Wish(words.stop_after, words.trust_pickle)
    os.umask(os.umask(0o022) | 0o002)  # checkpoints are never world-writable, whatever the shell says
    world = World.from_environment()
    try:
        plan = load_plan(words.run_file, words.overrides)
    except InputError as error:
        if world.local_rank == 0:  # each host reads its own files, and its ranks read the same
            _complain(world, error)
        return error.exit_code
    lock = RunLock(plan.out, f"{plan.run_path}: out")
    with StopSignal(plan.out, world) as stop:
        try:
            initialize_distributed(world)
            train(plan, world, stop, lock, wish)
            code, leaves_together = EXIT_FINISHED, True
        except RunError as error:
            _complain(world, error)
            code, leaves_together = error.exit_code, error.agreed
        except Exception:
            traceback.print_exc()
            code, leaves_together = EXIT_FAILED, False
        if lock.is_held:
            _record_exit(
                plan, code
            )  # while SIGTERM is only noted: the launcher ends us when a peer has ended
        if leaves_together:  # or the launcher ends the others when the first has ended
            barrier(world)
            dist.destroy_process_group()
    return code


def _record_exit(plan: Plan, code: int) -> None:
    try:
        record_exit(plan.out, code)
        if code == EXIT_NEEDS_PERSON:
            note_told(plan.out)
    except OSError as error:
        say(sys.stderr, f"ds_pretrain: exit code {code} could not be written to {plan.out}: {error}")


def _complain(world: World, error: RunError) -> None:
    """Say an error: once where all ranks met it, and with its rank where it may be one rank's own."""
    if world.is_main:
        say(sys.stderr, f"ds_pretrain: {error}")
    elif not error.agreed:
        say(sys.stderr, f"ds_pretrain: rank {world.rank} on {platform.node()}: {error}")


def _tell(world: World) -> Callable[[object], None]:
    """A way to say something to a person, once: rank 0 speaks."""

    def tell(message: object) -> None:
        if world.is_main:
            say(sys.stderr, f"ds_pretrain: {message}")

    return tell


if __name__ == "__main__":
    sys.exit(main())
