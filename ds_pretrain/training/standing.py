"""What checkpoints on this host say of their run, by their small files alone. No torch.

Nothing has been set aside yet, so whatever these folders hold is passed over where a start would not take it:
the start says what is wrong with it.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ds_pretrain.checkpoint.manifest import MANIFEST, RUN_STATE, parse_manifest, published, step_of
from ds_pretrain.config.plan import Plan
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.state import RunState
from ds_pretrain.training.known_run import KnownRun
from ds_pretrain.training.record import lost_words, read_record


def newest_here(plan: Plan) -> KnownRun | None:
    """What the newest readable checkpoint of a run's own remembers; None if there is none."""
    return next(_known_in(plan.checkpoints), None)


def lost_here(plan: Plan) -> list[str]:
    """Why a start would find nothing to go on from, where nothing can be fetched; empty if it would."""
    try:
        record = read_record(plan.out)
        # Of what was set aside the start says why.
        there = plan.ship_to is not None or any(plan.checkpoints.glob("step_*"))
    except (InputError, OSError):  # told by whoever reads the record
        return []
    if record is None or record.saved_step is None or there:
        return []
    return [lost_words(plan, record.saved_step)]


def origin_here(plan: Plan) -> KnownRun | None:
    """What the checkpoint at `resume_from` remembers; None without one, or if it is of another program."""
    return None if plan.run.resume_from is None else _known(Path(plan.run.resume_from))


def _known_in(root: Path) -> Iterator[KnownRun]:
    try:
        folders = published(root)
    except OSError:
        return
    yield from (known for folder in folders if (known := _known(folder)) is not None)


def _known(folder: Path) -> KnownRun | None:
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        text = (folder / RUN_STATE).read_bytes()
        if hashlib.sha256(text).hexdigest() != manifest.files[RUN_STATE].sha256:
            return None
        state = RunState.from_json(text.decode())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return KnownRun.of(folder, manifest, state) if step_of(folder.name) in (None, manifest.step) else None
