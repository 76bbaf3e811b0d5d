"""Checkpoints on their way to another place: behind training, and at its end with patience."""

import contextlib
import platform
from collections.abc import Callable, Collection
from time import monotonic
from types import TracebackType
from typing import Self

from ds_pretrain.checkpoint.manifest import MANIFEST, parse_manifest, step_name
from ds_pretrain.checkpoint.shipment import unshipped
from ds_pretrain.checkpoint.storage import Places, held_here
from ds_pretrain.checkpoint.upload import Shipper
from ds_pretrain.checkpoint.verify import rename_broken
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.distributed import Failure, World, from_main, gather_objects, gather_work

PATIENCE_SECONDS = 900.0  # at the end of a run, for what is not shipped yet
STOP_PATIENCE_SECONDS = 10.0  # at a stop: whoever asked for it may not wait long
_POLL_SECONDS = 2.0  # how long other ranks wait in one collective


class Shipping:
    """What one start ships, on every rank; a host's leader has a process for it. Opening is collective."""

    def __init__(self, plan: Plan, places: Places, world: World, tell: Callable[[str], None]) -> None:
        self._plan, self._places, self._world, self._tell = plan, places, world, tell
        self.is_on = plan.ship_to is not None
        self._shipper: Shipper | None = None
        leaders = [rank for rank, leads in enumerate(gather_objects(world, places.leads(world))) if leads]
        if self.is_on and places.per_host:
            _set_aside_hopeless(places, world, tell)
        if plan.ship_to is not None and places.leads(world):
            self._shipper = Shipper(
                places.root,
                plan.ship_to,
                leaders.index(world.rank),
                len(leaders),
                plan.run.checkpoint.keep,
                plan.keep_every,
            )

    def __enter__(self) -> Self:
        if self._shipper is not None:
            self._shipper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shipper is not None:
            self._shipper.close()

    def wake(self) -> None:
        """Something was published on this host."""
        if self._shipper is not None:
            self._shipper.wake()

    def finish(self, patience_seconds: float) -> None:
        """Wait until every checkpoint is shipped, or so long. Collective."""
        if not self.is_on:
            return
        deadline = monotonic() + patience_seconds
        while True:
            rest = min(_POLL_SECONDS, deadline - monotonic())
            done = self._shipper is None or self._shipper.wait(max(0.0, rest)) or rest <= 0
            if all(gather_objects(self._world, done)):
                break
        left = (platform.node(), self._places.root, self._shipper.unshipped() if self._shipper else [])
        for node, root, steps in gather_objects(self._world, left):
            if steps:
                listed = ", ".join(f"{step:,}" for step in steps[::-1])
                self._tell(
                    f"not shipped to {self._plan.ship_to} yet: steps {listed}; they are in {root} on {node}, "
                    "and the next start ships them"
                )


def _set_aside_hopeless(places: Places, world: World, tell: Callable[[str], None]) -> None:
    """Set aside what can never be whole at the other place, as a file of it is on no host. Collective.

    Hosts were lost or replaced since it was saved. Nobody would ever be done with it.
    """
    told = gather_work(world, lambda: _unshipped_here(places) if places.leads(world) else {})
    held: dict[str, set[str]] = {}
    for found in told:
        for text, names in ({} if isinstance(found, Failure) else found).items():
            held.setdefault(text, set()).update(names)
    hopeless = from_main(
        world, {t: r for t, n in held.items() if (r := _hopeless(t, n, places))} if world.is_main else {}
    )
    for text, reason in hopeless.items():
        manifest = parse_manifest(text)
        folder = places.root / step_name(manifest.step)
        with contextlib.suppress(OSError):
            if places.leads(world) and (folder / MANIFEST).read_text(encoding="utf-8") == text:
                rename_broken(folder)
        tell(f"the checkpoint of step {manifest.step:,} can never be shipped whole: {reason}; set aside")


def _unshipped_here(places: Places) -> dict[str, list[str]]:
    """The text of each manifest that is not shipped to the files of it that this host has."""
    found = {}
    for folder in unshipped(places.root):
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        with contextlib.suppress(ValueError):
            found[text] = held_here(folder, parse_manifest(text), text)
    return found


def _hopeless(text: str, held: Collection[str], places: Places) -> str | None:
    """A file that is neither on a host nor at the place. On rank 0."""
    manifest = parse_manifest(text)
    try:
        for name in sorted(manifest.files.keys() - set(held)):
            assert places.remote is not None
            if places.remote.size(manifest.step, name) != manifest.files[name].bytes:
                return f"{name} is on none of these hosts"
    except OSError:
        return None  # not known now
    return None
