"""The loop, and the module that the deepspeed launcher starts on every rank.

deepspeed [--hostfile F] --module ds_pretrain.train RUN.toml [section.key=value ...] [--stop-after STEP] ...
"""

import argparse
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

import torch.distributed as dist

from ds_pretrain.checkpoint import restore
from ds_pretrain.config.plan import Plan, load_plan
from ds_pretrain.core.distributed import EVERY_RANK, World, barrier, log, run_on_main
from ds_pretrain.core.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_NEEDS_OPERATOR,
    InputError,
    NeedsOperator,
    NoProgress,
    Preempted,
    RunError,
)
from ds_pretrain.core.files import FileLock
from ds_pretrain.core.run_files import StopSignal, record_exit, record_rank, run_lock
from ds_pretrain.core.state import RunState
from ds_pretrain.core.text import LogToStderr, say
from ds_pretrain.data.loader import BatchLoader
from ds_pretrain.data.usage import read_so_far
from ds_pretrain.data.validation_set import ValidationSet
from ds_pretrain.engine.engine import Engine, initialize_distributed
from ds_pretrain.monitor.monitor import Monitor
from ds_pretrain.training.compatibility import claim_run
from ds_pretrain.training.preflight import announce, format_skips, prepare_inputs
from ds_pretrain.training.resume import (
    DEFAULT_OPTIONS,
    StartOptions,
    find_start,
    read_known_run,
    repeat_probe,
    report_changes,
    resume,
)
from ds_pretrain.training.rollback import Watchdog
from ds_pretrain.training.saver import PATIENCE_SECONDS as UPLOAD_PATIENCE_SECONDS
from ds_pretrain.training.saver import STOP_PATIENCE_SECONDS, Saver, Uploads
from ds_pretrain.training.setup import (
    PhaseSwitch,
    claim_directory,
    label_remote,
    open_loader,
    open_monitor,
    open_phases,
    open_run_engine,
    open_validation_sets,
)
from ds_pretrain.training.step import RankSignals, measure, take_step
from ds_pretrain.training.validation import evaluate
from ds_pretrain.watchdog.rollback_log import mark_reported


def train(
    plan: Plan, world: World, stop: StopSignal, lock: FileLock, options: StartOptions = DEFAULT_OPTIONS
) -> None:
    """Train to the last step, surviving spikes, preemption and a change of world size. Collective.

    `lock` is that of the run directory; it is held when this returns or raises, if the directory was ours.

    Raises:
        InputError: something that an operator has to change; found before anything saved is touched.
        NeedsOperator: the watchdog has nothing left to try.
        Preempted: asked to stop; everything is saved.
        NoProgress: every update of this start was skipped.
    """
    started = perf_counter()
    inputs = prepare_inputs(plan, world)  # every problem of every rank, before an engine
    storage, rollback_log = claim_directory(plan, lock, world)
    own, origin = find_start(plan, options, storage, rollback_log, world)
    found = own or origin
    record = run_on_main(
        world, lambda: claim_run(plan, inputs.data, read_known_run(own), read_known_run(origin))
    )
    run_on_main(world, lambda: label_remote(storage, record))
    if own is not None and rollback_log.rollbacks:
        restore.discard_after(storage, own.state.step, world)
    announce(plan, inputs, world)
    record_rank(plan.out, world.rank)
    uploads = Uploads(plan, storage, world)
    if found is not None and found.state.step == plan.last_step:
        _finish_uploads(plan, uploads, world)
        return
    found = found and restore.reshard_if_needed(found, plan.deepspeed, storage, world)
    engine = open_run_engine(plan, world, inputs.pretrained)
    with ExitStack() as stack:
        monitor = stack.enter_context(open_monitor(plan, record, world))
        loader = stack.enter_context(open_loader(plan, inputs.sources, world))
        phases = open_phases(plan, engine, world)
        report_changes(record, monitor)
        state = rollback_log.apply_to(
            resume(found, engine, phases.enter, loader, plan, monitor, started, world)
        )
        for line in format_skips(plan, inputs.sources, state.ledger):
            log.info(line)
        restore_seconds = perf_counter() - started
        stack.enter_context(uploads)
        saver = Saver(plan, record, engine, monitor, storage, uploads, restore_seconds, world)
        watchdog = Watchdog(plan, monitor, storage, record.attempt, phases.enter, world)
        watchdog.resume(state, engine, loader)
        held_out = open_validation_sets(plan, inputs.validation)
        _train_from(
            state,
            _Run(plan, engine, phases, loader, monitor, saver, watchdog, held_out, stop, options, world),
        )


def _finish_uploads(plan: Plan, uploads: Uploads, world: World) -> None:
    with uploads:
        uploads.finish(UPLOAD_PATIENCE_SECONDS)
    if world.is_main:
        say(sys.stdout, f"finished   {plan.out}: all {plan.last_step:,} steps done")


@dataclass(frozen=True)
class _Run:
    """The parts that the loop works with."""

    plan: Plan
    engine: Engine
    phases: PhaseSwitch
    loader: BatchLoader
    monitor: Monitor
    saver: Saver
    watchdog: Watchdog
    validation: Mapping[int, Sequence[ValidationSet]]  # by sequence length
    stop: StopSignal
    options: StartOptions
    world: World

    def signals(self) -> RankSignals:
        """The requests that this rank has now."""
        save = self.stop.is_save_asked() or self.saver.is_due_by_clock()
        return RankSignals(self.stop.is_asked(), save, self.saver.progress)


def _train_from(state: RunState, run: _Run) -> None:
    """Train step by step to the last one, or to where the run is asked to stop. Collective."""
    plan, saver, watchdog = run.plan, run.saver, run.watchdog
    num_attempted = num_applied = 0
    while state.step < plan.last_step:
        started = perf_counter()
        run.phases.enter(state.step)
        batch = run.loader.at(state)
        rate, limit = plan.lr(state.step, state.num_updates), watchdog.norm_limit(state)
        losses, update = take_step(run.engine, batch, rate, plan.run.model.z_loss, run.world, limit)
        step, reduced = measure(plan, state, batch, rate, losses, update, started, run.signals(), run.world)
        run.monitor.step(step)
        state, verdict = watchdog.judge(state, step, reduced.rank_losses, batch.ids)
        saver.advance(reduced.save_progress, reduced.probe if verdict.action == "ok" else None)
        probe = partial(repeat_probe, run.engine, batch, step.step - 1, run.world)
        if watchdog.should_roll_back(state, verdict):
            saver.finish()
            try:
                state = watchdog.roll_back(state, verdict, run.engine, run.loader, step.step)
            except NeedsOperator:
                saver.save_for_operator(state, probe)
                raise
            saver.on_rollback(state)
            continue
        saver.note_health(state)
        num_attempted, num_applied = num_attempted + 1, num_applied + step.update_applied
        is_last = state.step == plan.last_step
        if is_last and num_attempted > 1 and not num_applied:
            saver.finish()
            raise NoProgress(
                f"all {num_attempted} optimizer steps of this start were skipped (non-finite or outlier "
                f"gradient norm); lower schedule.peak_lr, or check the data"
            )
        _report(state, batch.ids.seq_len, run)
        stops = reduced.stop or state.step == run.options.stop_after
        if stops or is_last:
            saver.save_blocking(state, probe)
        elif reduced.save or saver.is_due(state):
            saver.save(state, probe)
        if is_last:
            watchdog.finish(state)
            run.monitor.event("finish", step=state.step)
            saver.finish_uploads(UPLOAD_PATIENCE_SECONDS)
        elif stops:
            run.monitor.event("stop", step=state.step)
            saver.finish_uploads(STOP_PATIENCE_SECONDS)
            raise Preempted(
                f"preempted at step {state.step:,}, checkpoint saved; rerun the same command to resume"
            )


def _report(state: RunState, seq_len: int, run: _Run) -> None:
    """Validate when it is due and after the last step; then, and as a phase ends, record what was read.

    Collective.
    """
    plan, step, section = run.plan, state.step, run.plan.run.validation
    is_last = step == plan.last_step
    validates = section is not None and (is_last or section.is_due(step, plan.timeline))
    if section is not None and validates:
        sets, micro = run.validation[seq_len], plan.micro_batch_size(step - 1)
        found = evaluate(run.engine, sets, micro, run.world, section.retrieval)
        run.monitor.validation(step, found.losses, found.by_position, found.retrieval)
    if validates or is_last or plan.timeline.ends_phase(step):
        read = read_so_far(run.loader.sampler, step, state.ledger)
        sources = {name: asdict(source) for name, source in read.items()}
        run.monitor.event("data", step=step, phase=plan.timeline.at(step - 1).phase, sources=sources)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run file named on the command line; the exit code of this rank."""
    parser = argparse.ArgumentParser(prog="python -m ds_pretrain.train")
    parser.add_argument("run_file", metavar="RUN.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the launcher; LOCAL_RANK says the same
    parser.add_argument("--stop-after", type=int, metavar="STEP")
    parser.add_argument("--trust-pickle", action="store_true")
    words = parser.parse_intermixed_args(argv)
    options = StartOptions(words.stop_after, words.trust_pickle)
    os.umask(os.umask(0o022) | 0o002)  # checkpoints are never world-writable, whatever the shell says
    world = World.from_environment()
    LogToStderr(world.rank).install()
    try:
        plan = load_plan(words.run_file, words.overrides)
    except InputError as error:
        if world.local_rank == 0:  # each host reads its own files, and its ranks read the same
            log.error(error, extra=EVERY_RANK)
        return error.exit_code
    lock = run_lock(plan.out)
    with StopSignal(plan.out, world) as stop:
        try:
            initialize_distributed(world)
            train(plan, world, stop, lock, options)
            code, leaves_together = EXIT_FINISHED, True
        except RunError as error:
            log.error(error, extra=None if error.agreed else EVERY_RANK)
            code, leaves_together = error.exit_code, error.agreed
        except Exception:
            traceback.print_exc()
            code, leaves_together = EXIT_FAILED, False
        if lock.is_held:  # while SIGTERM is only noted: the launcher ends us when a peer has ended
            _record_exit(plan, code)
        if leaves_together:  # or the launcher ends the others when the first has ended
            barrier(world)
            dist.destroy_process_group()
    return code


def _record_exit(plan: Plan, code: int) -> None:
    try:
        record_exit(plan.out, code)
        if code == EXIT_NEEDS_OPERATOR:
            mark_reported(plan.out)
    except OSError as error:
        log.error(f"exit code {code} could not be written to {plan.out}: {error}")


if __name__ == "__main__":
    exit_code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # its reader may have gone, or it is closed
            stream.flush()
    os._exit(exit_code)  # threads that gloo leaves behind can abort an interpreter that takes itself apart
