"""`ds-pretrain checkpoints RUN ...`: what a person may ask about checkpoints, and do to them."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ds_pretrain.config.plan import load_plan
from ds_pretrain.config.schema import check_place
from ds_pretrain.core.errors import InputError

if TYPE_CHECKING:
    from ds_pretrain.checkpoint.remote import Remote

EXIT_DIFFERENT = 1  # of `diff`, as that of diff(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of the command."""
    parser.add_argument("run", metavar="RUN", help="a run directory, a run file, or a folder of checkpoints")
    parser.add_argument("action", nargs="?", default="list", choices=tuple(_ACTIONS), help="default: list")
    parser.add_argument(
        "names", nargs="*", metavar="STEP", help="the checkpoint of a step; for diff also the path of one"
    )
    parser.add_argument("--all", action="store_true", help="verify: every checkpoint, as without a step")
    parser.add_argument(
        "--shipped", action="store_true", help="list, verify, pin, unpin: at checkpoint.ship_to of a run file"
    )


def checkpoints_command(words: argparse.Namespace) -> int:
    """List, verify, compare, pin or convert the checkpoints of a run."""
    if words.shipped and words.action not in _ACTIONS_THERE:
        raise InputError(f"checkpoints {words.action}: --shipped belongs to {', '.join(_ACTIONS_THERE)}")
    if words.all and words.action != "verify":
        raise InputError(f"checkpoints {words.action}: --all belongs to verify")
    if words.all and words.names:
        raise InputError("checkpoints verify: give a step or --all, not both")
    expected = _NUM_NAMES[words.action]
    if len(words.names) not in expected:
        counts = " or ".join(map(str, expected))
        raise InputError(
            f"checkpoints {words.action}: {len(words.names)} checkpoint(s) named, expected {counts}, like "
            f"`checkpoints RUN {words.action}{' 1000' * expected[-1]}`"
        )
    if words.shipped:
        return _ACTIONS_THERE[words.action](_place(Path(words.run)), words.names)
    if words.action == "diff" and all(_step(name) is None for name in words.names):
        return _diff(Path(), words.names)  # two folders, wherever they are
    return _ACTIONS[words.action](checkpoint_root(Path(words.run)), words.names)


def checkpoint_root(run: Path) -> Path:
    """The folder of checkpoints that is meant: of a run directory, of a run file's, or itself.

    Raises:
        InputError: it is not here, and the run file says where checkpoints are, too.
    """
    from ds_pretrain.checkpoint.manifest import published

    if run.is_dir():
        return run if published(run) else run / "checkpoints"
    plan = load_plan(run)
    root = plan.out / "checkpoints"
    if root.is_dir() or plan.ship_to is None:
        return root
    on_hosts = f"each host has its own in {plan.checkpoints}, " if plan.checkpoints != root else ""
    raise InputError(
        f"{run}: there is no {root} here; {on_hosts}and what has been shipped is in {plan.ship_to}: ask "
        f"about that with --shipped, or name a folder of checkpoints instead of {run}"
    )


def parent_place(run: str) -> "Path | Remote":
    """Where the checkpoints are that another run begins from: here, or where they were shipped to.

    Raises:
        InputError: a run directory that holds none, or a URL with a credential in it.
    """
    from ds_pretrain.checkpoint.manifest import published
    from ds_pretrain.checkpoint.remote import remote_at

    if "://" in run:
        try:
            return remote_at(check_place(run))
        except ValueError as error:
            raise InputError(str(error)) from None
    if (path := Path(run)).is_dir():
        root = checkpoint_root(path)
        if published(root) or not (path / "run.toml").is_file():
            return root
        raise InputError(
            f"{run} holds no checkpoint; give the run file, whose checkpoint.ship_to says where they were "
            "shipped to, or that place itself, a folder or a URL"
        )
    plan = load_plan(path)
    root = plan.out / "checkpoints"
    if published(root) or plan.ship_to is None:
        return root
    return remote_at(plan.ship_to) if "://" in plan.ship_to else Path(plan.ship_to)


def _place(run: Path) -> "Remote":
    """Where the checkpoints of a run file are shipped to."""
    from ds_pretrain.checkpoint.remote import remote_at

    place = load_plan(run).ship_to
    if place is None:
        raise InputError(f"{run}: checkpoints are not shipped; --shipped needs checkpoint.ship_to there")
    return remote_at(place)


def _list_there(remote: "Remote", names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import entries_there, table

    lines = table(list(entries_there(remote)), datetime.now(UTC))
    print("\n".join(lines) or f"{remote.place} holds no checkpoint")
    return 0


def _verify_there(remote: "Remote", names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import wrong_there

    steps = [_step_there(remote, names[0])] if names else remote.steps()
    reasons = {step: wrong_there(remote, step) for step in steps}
    for step, reason in reasons.items():
        print(f"step {step:,}  {reason or 'intact'}")
    if any(reasons.values()):
        raise InputError(f"not every checkpoint at {remote.place} is intact")
    return 0


def _pin_there(remote: "Remote", names: list[str]) -> int:
    from ds_pretrain.checkpoint.retention import PINNED

    step = _step_there(remote, names[0])
    remote.write(step, PINNED, b"")
    print(f"step {step:,} is kept for good at {remote.place}")
    return 0


def _unpin_there(remote: "Remote", names: list[str]) -> int:
    from ds_pretrain.checkpoint.retention import PINNED, noted_branches

    step = _step_there(remote, names[0])
    branched = noted_branches(remote.read(step, PINNED) or b"")
    remote.remove(step, PINNED)
    print(f"step {step:,} is pruned in its turn at {remote.place}{_branched_words(branched)}")
    return 0


def _step_there(remote: "Remote", name: str) -> int:
    step, there = _step(name), remote.steps()
    if step not in there or step is None:
        listed = ", ".join(f"{s:,}" for s in there) or "none"
        raise InputError(f"{remote.place} has no checkpoint of step {name}; it has: {listed}")
    return step


def _list(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import listed

    print("\n".join([*_lineage(root.parent), *listed(root)]) or f"{root} holds no checkpoint")
    return 0


def _lineage(out: Path) -> Iterator[str]:
    """Where a branch comes from."""
    from ds_pretrain.checkpoint.manifest import MANIFEST, step_name
    from ds_pretrain.core.files import checksum
    from ds_pretrain.training.record import read_record

    record = None
    with suppress(InputError):  # a start says what is wrong with it
        record = read_record(out)
    if record is None or (line := record.lineage) is None:
        return
    folder = f"{line.directory}/{step_name(line.step)}"
    now = "not looked at" if "://" in folder else "it is no longer there"
    with suppress(OSError):
        is_same = checksum(Path(folder) / MANIFEST) == line.manifest
        now = "it is there" if is_same else "another one is there now"
    yield (
        f"branched from {line.name} at step {line.step:,}: {folder} (run {line.run}, manifest "
        f"{line.manifest[:12]}; {now})"
    )


def _verify(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import entries, verified

    folders = [_chosen(root, names[0])] if names else [entry.folder for entry in entries(root)]
    if not folders:
        print(f"{root} holds no checkpoint")
    all_intact = True
    for folder in folders:
        reason = verified(folder)
        all_intact &= reason is None
        print(f"{folder.name}  {reason or 'intact'}", flush=True)
    if not all_intact:
        raise InputError("not every checkpoint is intact; a start takes the newest that is")
    return 0


def _pin(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.retention import pin

    folder = _chosen(root, names[0])
    pin(folder, True)
    print(f"{folder.name} is kept for good")
    return 0


def _unpin(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.retention import branches, pin

    folder = _chosen(root, names[0])
    branched = branches(folder)
    pin(folder, False)
    print(f"{folder.name} is pruned in its turn{_branched_words(branched)}")
    return 0


def _branched_words(branched: Sequence[tuple[str, str]]) -> str:
    """Of the runs that the pin was for: what becomes of them."""
    if not branched:
        return ""
    runs = ", ".join(f"{name} ({out})" for name, out in branched)
    return (
        f"; it was pinned because {runs} began from it: what a branch needs lies in its own run "
        "directory, and its lineage will name a checkpoint that is gone"
    )


def _universal(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.inventory import verified

    folder = _chosen(root, names[0])
    if reason := verified(folder):
        raise InputError(f"{folder} is broken: {reason}; only an intact checkpoint is converted")
    from ds_pretrain.checkpoint.reshard import convert

    print(f"{convert(folder)} can be loaded on any number of ranks")
    return 0


def _diff(root: Path, names: list[str]) -> int:
    from ds_pretrain.checkpoint.diff import described, differences

    a, b = (_chosen(root, name) if _step(name) is not None else Path(name) for name in names)
    found = differences(a, b)
    print("\n".join(described(found)))
    return 0 if found.none else EXIT_DIFFERENT


def _chosen(root: Path, name: str) -> Path:
    from ds_pretrain.checkpoint.inventory import chosen

    step = _step(name)
    if step is None:
        raise InputError(f"{name!r} is no step; give a whole number, as `checkpoints RUN` lists them")
    return chosen(root, step)


def _step(name: str) -> int | None:
    digits = name.replace(",", "").replace("_", "")
    return int(digits) if digits.isascii() and digits.isdigit() else None


_ACTIONS: Mapping[str, Callable[[Path, list[str]], int]] = {
    "list": _list,
    "verify": _verify,
    "diff": _diff,
    "pin": _pin,
    "unpin": _unpin,
    "universal": _universal,
}
_ACTIONS_THERE: Mapping[str, Callable[["Remote", list[str]], int]] = {
    "list": _list_there,
    "verify": _verify_there,
    "pin": _pin_there,
    "unpin": _unpin_there,
}
# How many checkpoints each is told.
_NUM_NAMES = {"list": (0,), "verify": (0, 1), "diff": (2,), "pin": (1,), "unpin": (1,), "universal": (1,)}
