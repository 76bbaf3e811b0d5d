"""Checkpoints on their way to another place: behind training, and at its end with patience."""

import contextlib
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

from ds_pretrain.checkpoint.layout import MANIFEST, parse_manifest
from ds_pretrain.checkpoint.places import Places
from ds_pretrain.checkpoint.ship import Shipper
from ds_pretrain.checkpoint.shipment import unshipped
from ds_pretrain.checkpoint.verdict import rename_broken
from ds_pretrain.plan import Plan
from ds_pretrain.world import World, gather_objects

PATIENCE_SECONDS = 900.0  # at the end of a start, for what is not shipped yet
_POLL_SECONDS = 2.0  # how long other ranks wait in one collective


class Shipping:
    """What one start ships, on every rank; a host's leader has a process for it. Opening is collective."""

    def __init__(self, plan: Plan, places: Places, world: World, tell: Callable[[str], None]) -> None:
        self._plan, self._places, self._world, self._tell = plan, places, world, tell
        self.is_on = plan.ship_to is not None
        self._shipper: Shipper | None = None
        leaders = [rank for rank, leads in enumerate(gather_objects(world, places.leads(world))) if leads]
        if plan.ship_to is not None and places.leads(world):
            self._shipper = Shipper(
                places.root,
                plan.ship_to,
                leaders.index(world.rank),
                len(leaders),
                plan.run.checkpoint.keep,
                plan.keep_every_steps,
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

    def retire(self) -> None:
        """Set aside what this host holds of a checkpoint that can never be whole on the hosts there are now.

        Once a newer one is published, or none is to come: until then it may be the newest.
        """
        if self._shipper is None or not self._places.per_host:
            return
        for folder in unshipped(self._places.root):
            with contextlib.suppress(OSError, ValueError):
                saved = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8")).world_size
                if saved != self._world.size:
                    rename_broken(folder)

    def finish(self) -> None:
        """Wait until every checkpoint is shipped, or for as long as that is worth it. Collective."""
        if not self.is_on:
            return
        self.retire()
        deadline = monotonic() + PATIENCE_SECONDS
        while True:
            done = self._shipper is None or self._shipper.wait(_POLL_SECONDS) or monotonic() > deadline
            if all(gather_objects(self._world, done)):
                break
        for steps in gather_objects(self._world, self._shipper.unshipped() if self._shipper else []):
            if steps:
                self._tell(
                    f"the checkpoints of steps {', '.join(f'{s:,}' for s in steps[::-1])} are not shipped to "
                    f"{self._plan.ship_to}; they are in {self._places.root}, and another start ships them"
                )
