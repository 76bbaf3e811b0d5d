"""`ds-pretrain checkpoints RUN ...`: what an operator may ask about checkpoints, and do to them."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from ds_pretrain.checkpoint.manifest import MANIFEST, list_published, parse_step, step_name
from ds_pretrain.checkpoint.remote import Remote, open_folder_as_remote, reopen_remote
from ds_pretrain.checkpoint.retention import PINNED, read_branches
from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.schema import check_location
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import compute_checksum

EXIT_DIFFERENT = 1  # of `diff`, as that of diff(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of the command."""
    parser.add_argument("run", metavar="RUN", help="a run directory, a run file, or a folder of checkpoints")
    parser.add_argument("action", nargs="?", default="list", choices=tuple(_ACTIONS), help="default: list")
    parser.add_argument(
        "names", nargs="*", metavar="STEP", help="the checkpoint of a step; for diff also the path of one"
    )
    parser.add_argument(
        "--uploaded",
        action="store_true",
        help="list, verify, pin, unpin: at checkpoint.upload_to of a run file",
    )


def execute(words: argparse.Namespace) -> int:
    """List, verify, compare, pin or convert the checkpoints of a run."""
    action = _ACTIONS[words.action]
    if words.uploaded and not action.is_there:
        names = ", ".join(name for name, other in _ACTIONS.items() if other.is_there)
        raise InputError(f"checkpoints {words.action}: --uploaded belongs to {names}")
    if len(words.names) not in action.num_names:
        counts = " or ".join(map(str, action.num_names))
        raise InputError(
            f"checkpoints {words.action}: {len(words.names)} checkpoint(s) named, expected {counts}, like "
            f"`checkpoints RUN {words.action}{' 1000' * action.num_names[-1]}`"
        )
    return action.act(_Asked(Path(words.run), words.uploaded), words.names)


def find_checkpoint_root(run: Path) -> Path:
    """The folder of checkpoints that is meant: of a run directory, of a run file's, or itself.

    Raises:
        InputError: it is not here, and the run file says where checkpoints are, too.
    """
    if run.is_dir():
        return run if list_published(run) else run / "checkpoints"
    plan = load_plan(run)
    root = plan.out / "checkpoints"
    if root.is_dir() or plan.upload_to is None:
        return root
    on_hosts = f"each host has its own in {plan.checkpoints}, " if plan.checkpoints != root else ""
    raise InputError(
        f"{run}: there is no {root} here; {on_hosts}and uploaded checkpoints are in {plan.upload_to}; use "
        f"--uploaded, or name a folder of checkpoints instead of {run}"
    )


def find_parent_location(run: str) -> Path | Remote:
    """Find the checkpoints of a parent run: a folder here, or the remote they were uploaded to.

    Raises:
        InputError: a run directory that holds none, or a URL with a credential in it.
    """
    if "://" in run:
        try:
            return reopen_remote(check_location(run))
        except ValueError as error:
            raise InputError(str(error)) from None
    if (path := Path(run)).is_dir():
        root = find_checkpoint_root(path)
        if list_published(root) or not (path / "run.toml").is_file():
            return root
        raise InputError(
            f"{run} has no checkpoint; give the run file, whose checkpoint.upload_to names the remote, or "
            f"the remote itself (a folder or a URL)"
        )
    plan = load_plan(path)
    root = plan.out / "checkpoints"
    if list_published(root) or plan.upload_to is None:
        return root
    return reopen_remote(plan.upload_to) if "://" in plan.upload_to else Path(plan.upload_to)


@dataclass(frozen=True)
class _Asked:
    """The checkpoints that are meant: in a folder here, or where the run file uploads them to."""

    run: Path
    is_remote: bool

    @cached_property
    def root(self) -> Path:
        return find_checkpoint_root(self.run)

    @cached_property
    def location(self) -> Remote:
        if not self.is_remote:
            return open_folder_as_remote(self.root)
        location = load_plan(self.run).upload_to
        if location is None:
            raise InputError(
                f"{self.run}: checkpoints are not uploaded; --uploaded needs checkpoint.upload_to there"
            )
        return reopen_remote(location)

    def steps(self) -> list[int]:
        """The newest first. A folder here may be broken in that it has no manifest."""
        if self.is_remote:
            return self.location.list_steps()
        return [step for folder in list_published(self.root) if (step := parse_step(folder.name)) is not None]

    def step(self, name: str) -> int:
        """The step of that name, if there is a checkpoint of it."""
        step, there = _parse_step_name(name), self.steps()
        if step is None:
            raise InputError(f"{name!r} is not a step; give a whole number, as `checkpoints RUN` lists them")
        if step not in there:
            listed = ", ".join(f"{s:,}" for s in there) or "none"
            raise InputError(f"{self.location.location} has no checkpoint of step {step:,}; it has: {listed}")
        return step

    def folder(self, name: str) -> Path:
        """The folder here of a step by its name."""
        return self.root / step_name(self.step(name))

    @property
    def there(self) -> str:
        """The remote, for messages; empty for this host."""
        return f" at {self.location.location}" if self.is_remote else ""


def _list_checkpoints(asked: _Asked, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import format_inventory, format_table, list_remote_entries

    if asked.is_remote:
        lines = list(format_table(list(list_remote_entries(asked.location)), datetime.now(UTC)))
    else:
        lines = [*_format_lineage(asked.root.parent), *format_inventory(asked.root)]
    print("\n".join(lines) or f"{asked.location.location} has no checkpoint")
    return 0


def _format_lineage(out: Path) -> Iterator[str]:
    """Format the lineage of a branch."""
    from ds_pretrain.training.record import read_record

    record = None
    with suppress(InputError):  # a start says what is wrong with it
        record = read_record(out)
    if record is None or (line := record.lineage) is None:
        return
    folder = f"{line.directory}/{step_name(line.step)}"
    now = "not looked at" if "://" in folder else "it is no longer there"
    with suppress(OSError):
        is_same = compute_checksum(Path(folder) / MANIFEST) == line.manifest
        now = "it is there" if is_same else "another one is there now"
    yield (
        f"branched from {line.name} at step {line.step:,}: {folder} (run {line.run}, manifest "
        f"{line.manifest[:12]}; {now})"
    )


def _verify(asked: _Asked, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import find_remote_problem, verify_folder

    steps = [asked.step(name) for name in names] or asked.steps()
    if not steps:
        print(f"{asked.location.location} has no checkpoint")
    all_intact = True
    for step in steps:
        folder = step_name(step)
        reason = (
            find_remote_problem(asked.location, step)
            if asked.is_remote
            else verify_folder(asked.root / folder)
        )
        all_intact &= reason is None
        print(f"{folder}  {reason or 'intact'}", flush=True)
    if not all_intact:
        raise InputError(f"not every checkpoint{asked.there} is intact; a start takes the newest that is")
    return 0


def _pin(asked: _Asked, names: list[str]) -> int:
    step, location = asked.step(names[0]), asked.location
    if location.get_size(step, PINNED) is None:  # what a branch noted there stays
        location.write(step, PINNED, b"")
    print(f"pinned {step_name(step)}{asked.there}")
    return 0


def _unpin(asked: _Asked, names: list[str]) -> int:
    step, location = asked.step(names[0]), asked.location
    branched = read_branches(location.read(step, PINNED) or b"")
    location.remove(step, PINNED)
    runs = ", ".join(f"{name} ({out})" for name, out in branched)
    lost = (
        f"; it was pinned because {runs} began from it: what a branch needs lies in its own run "
        "directory, and its lineage will name a checkpoint that is gone"
    )
    print(f"unpinned {step_name(step)}{asked.there}: retention applies again{lost if branched else ''}")
    return 0


def _convert_to_universal(asked: _Asked, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import verify_folder
    from ds_pretrain.checkpoint.reshard import convert

    folder = asked.folder(names[0])
    if reason := verify_folder(folder):
        raise InputError(f"{folder} is broken: {reason}; only an intact checkpoint is converted")
    print(f"{convert(folder)} can be loaded on any number of ranks")
    return 0


def _compare_two(asked: _Asked, names: list[str]) -> int:
    from ds_pretrain.checkpoint.diff import compare_checkpoints, describe_differences

    a, b = (Path(name) if _parse_step_name(name) is None else asked.folder(name) for name in names)
    found = compare_checkpoints(a, b)
    print("\n".join(describe_differences(found)))
    return 0 if found.is_empty else EXIT_DIFFERENT


def _parse_step_name(name: str) -> int | None:
    digits = name.replace(",", "").replace("_", "")
    return int(digits) if digits.isascii() and digits.isdigit() else None


@dataclass(frozen=True)
class _Action:
    act: Callable[[_Asked, list[str]], int]
    num_names: tuple[int, ...]  # how many checkpoints it may be told
    is_there: bool  # whether it works where checkpoints are uploaded to


_ACTIONS = {
    "list": _Action(_list_checkpoints, (0,), is_there=True),
    "verify": _Action(_verify, (0, 1), is_there=True),
    "diff": _Action(_compare_two, (2,), is_there=False),
    "pin": _Action(_pin, (1,), is_there=True),
    "unpin": _Action(_unpin, (1,), is_there=True),
    "universal": _Action(_convert_to_universal, (1,), is_there=False),
}
