"""When a checkpoint is due."""

from collections.abc import Sequence
from time import monotonic

from ds_pretrain.config.timeline import Duration, Timeline, multiples


def due_by_count(triggers: Sequence[Duration], step: int, timeline: Timeline) -> bool:
    """True if `step` finished steps, or the tokens they read, pass a multiple of a trigger."""
    counted = [multiples(trigger, timeline) for trigger in triggers if trigger.unit in ("steps", "tokens")]
    return any(one.before(step) > one.before(step - 1) for one in counted)


def ends_phase(step: int, timeline: Timeline) -> bool:
    """True if the next step is the first of another phase."""
    return step < timeline.last_step and timeline.at(step).phase != timeline.at(step - 1).phase


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
