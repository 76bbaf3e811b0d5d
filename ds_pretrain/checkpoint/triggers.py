"""When a checkpoint is due by the clock."""

from collections.abc import Sequence
from time import monotonic

from ds_pretrain.config.timeline import Duration


class WallClock:
    """Time since the last save, on one rank: its answer has to be shared before anyone acts on it."""

    def __init__(self, triggers: Sequence[Duration]) -> None:
        self._seconds = min((t.seconds for t in triggers if t.unit == "seconds"), default=None)
        self._since = monotonic()

    def is_due(self) -> bool:
        """True if the shortest wall-clock trigger has passed since `restart`."""
        return self._seconds is not None and monotonic() - self._since >= self._seconds

    def restart(self) -> None:
        """Count from now: a checkpoint was saved."""
        self._since = monotonic()
