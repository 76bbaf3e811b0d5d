"""What checkpoints on this host say of their run, by their manifests alone. No torch."""

from pathlib import Path

from ds_pretrain.checkpoint.layout import MANIFEST, RUN_STATE, parse_manifest, published
from ds_pretrain.plan import Plan
from ds_pretrain.run_directory import KnownRun
from ds_pretrain.state import RunState


def newest_here(plan: Plan) -> KnownRun | None:
    """What the newest readable checkpoint of a run's own remembers; None if there is none."""
    found = (_known(folder) for folder in published(plan.checkpoints))
    return next((known for known in found if known is not None), None)


def origin_here(plan: Plan) -> KnownRun | None:
    """What the checkpoint at `resume_from` remembers; None without one, or if it is of another program."""
    return None if plan.run.resume_from is None else _known(Path(plan.run.resume_from))


def _known(folder: Path) -> KnownRun | None:
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8"))
        state = RunState.from_json((folder / RUN_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # a start says what is wrong with it
        return None
    return KnownRun(
        str(folder.absolute()),
        manifest.step,
        manifest.attempt,
        manifest.wandb_id,
        manifest.identity,
        len(state.rollbacks),
    )
