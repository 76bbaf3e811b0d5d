"""Decides which changes of the run file a resume accepts: those that lie ahead, and no past ones.

The identity of a run is all that fixes where its weights go, with phases, batches and schedule in steps. Each
checkpoint and `run.json` keep it, as JSON has it; what the finished steps have met of it is compared.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_pretrain.config.plan import Plan
from ds_pretrain.config.schedule import lr_scaling_factor
from ds_pretrain.config.schema import PhaseSection
from ds_pretrain.config.timeline import Duration, find_changed_chunks
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import check_folder
from ds_pretrain.core.jsonl import show_value
from ds_pretrain.core.text import find_changed_fields, parse_json, read_text
from ds_pretrain.data.mixture import compute_block_quotas
from ds_pretrain.models.pretrained import Pretrained
from ds_pretrain.training.record import (
    RECORD,
    KnownRun,
    RunRecord,
    build_record_from_checkpoint,
    describe_lost_checkpoints,
    draw_run_id,
    list_foreign_files,
    read_record,
    write_record,
)
from ds_pretrain.watchdog.rollback_log import read_rollback_log

Changes = dict[str, tuple[Any, Any]]

# What fixes a run's trajectory. Another value in the same run directory is another run.
_IDENTITY = ("name", "seed", "model", "schedule", "batch", "sources", "phases")
WEIGHTS = "[model] from"  # among the contents of sources, none of which can be called so
# What the numbers of an identity count.
_UNITS = {
    **dict.fromkeys(("schedule.length", "schedule.warmup", "schedule.decay"), "steps"),
    **dict.fromkeys(("batch.tokens", "batch.lr_reference_tokens"), "tokens"),
}
# What a saved config says of how it was made or is run, and no weight or activation of training depends on.
_ASIDE = frozenset(
    (
        *("transformers_version", "use_cache", "torch_dtype", "dtype", "architectures", "auto_map"),
        *("name_or_path", "_name_or_path", "_commit_hash", "_attn_implementation_autoset"),
    )
)


def compute_identity(plan: Plan, data: Mapping[str, str]) -> dict[str, Any]:
    """The identity of a run: what must not differ between two starts of it, as JSON has it.

    `data` describes the content of each source, and of the weights to begin with: they may move, and may not
    change.
    """
    fields, run = plan.run.model_dump(mode="json"), plan.run
    identity = {key: fields[key] for key in _IDENTITY}
    identity["schedule"] = {k: v.steps if isinstance(v, Duration) else v for k, v in plan.schedule}
    identity["batch"] = {  # how a rank takes its share may change
        "tokens": run.batch.tokens,
        "ramp": None if run.batch.ramp is None else _list_batch_sizes(plan),
        "lr_scaling": run.batch.lr_scaling,
        "lr_reference_tokens": None if run.batch.lr_scaling == "none" else plan.lr_reference_tokens,
    }
    identity["chunk_tokens"] = plan.chunk_tokens
    identity["phases"] = {phase.name: _describe_phase(plan, phase) for phase in run.phases}
    identity["sources"] = {name: text for name, text in data.items() if name != WEIGHTS}
    identity["deepspeed"] = _select_trajectory_keys(plan.deepspeed)
    identity["model"]["config"] = _normalize_config(plan.model)  # the content, wherever the file lies
    identity["model"]["pretrained"] = data.get(WEIGHTS)
    return dict(json.loads(json.dumps(identity)))


def _describe_phase(plan: Plan, phase: PhaseSection) -> dict[str, Any]:
    rope = {} if phase.rope is None else phase.rope.model_dump(mode="json", exclude_none=True)
    first_step = plan.timeline.phase_start(phase.name)
    return {"first_step": first_step, "seq_len": phase.seq_len, "mixture": phase.mixture, "rope": rope}


def _list_batch_sizes(plan: Plan) -> list[list[int]]:
    """The steps from which on a step has another number of tokens, and that number."""
    sizes = [[segment.first_step, segment.tokens_per_step] for segment in plan.timeline.segments]
    return [one for one, before in zip(sizes, [[0, 0], *sizes], strict=False) if one[1] != before[1]]


def _select_trajectory_keys(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keys of the DeepSpeed JSON that decide the weights' trajectory.

    A load brings the saved options of the optimizer back: another value would be ignored in silence.
    """
    optimizer = deepspeed.get("optimizer", {})
    how = ("torch_adam", "fused")
    params = {key: value for key, value in optimizer.get("params", {}).items() if key not in how}
    return {
        "optimizer": {"type": optimizer.get("type"), "params": params},
        "gradient_clipping": deepspeed.get("gradient_clipping"),
    }


def _normalize_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model config without what training does not depend on; null is absent."""
    return {key: value for key, value in model.items() if key not in _ASIDE and value is not None}


def list_ropes_until(identity: Mapping[str, Any], step: int) -> list[Any]:
    """Each change of rotary positions up to the update after `step` finished steps, in order.

    With the model's config, they are all that its positions follow from, whatever the phases are called.
    """
    phases = sorted(identity.get("phases", {}).values(), key=lambda phase: int(phase["first_step"]))
    return [phase["rope"] for phase in phases if phase["first_step"] <= step and phase["rope"]]


def find_past_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], step: int | None, begun: Collection[str] = ()
) -> Changes:
    """Dotted path to (old, new) of what the first `step` steps would have met otherwise. None: of everything.

    Phases that have `begun` count as met, also where the run was taken back to their first step: which of
    their samples are skipped was decided by what they read then. No draw depends on their rotary positions.
    """
    if step is None:
        return find_changed_fields(old, new)
    both = (old, new)
    met = {name for one in both for name, phase in one["phases"].items() if phase["first_step"] < step}
    drawn = met | {*begun}
    phases = [one["phases"][name] for one in both for name in drawn & one["phases"].keys()]
    sources = {source for phase in phases for source in phase["mixture"]}
    schedule = {key for one in both for key in _find_schedule_fields_in_use(one["schedule"], step)}
    batch = _find_batch_fields_in_use(old["batch"], new["batch"], step)

    def past(identity: Mapping[str, Any]) -> dict[str, Any]:
        phases = {name: dict(phase) for name, phase in identity["phases"].items() if name in drawn}
        for name in phases.keys() - met:
            del phases[name]["rope"]
        return {
            **identity,
            "phases": phases,
            **{key: _select_keys(identity.get(key, {}), sources) for key in ("sources", "chunk_tokens")},
            "schedule": _select_keys(identity["schedule"], schedule),
            "batch": _select_keys(identity["batch"], batch),
        }

    alike = tuple(f"phases.{name}.mixture." for name in drawn if _draw_alike(name, old, new))
    changes = find_changed_fields(past(old), past(new))
    return {path: pair for path, pair in changes.items() if not path.startswith(alike)}


def _draw_alike(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """True if a phase's weights are only on another scale: what is drawn are whole draws of a block."""
    phases = [identity["phases"].get(name) for identity in (old, new)]
    quotas = [compute_block_quotas(phase["mixture"]) for phase in phases if phase is not None]
    return len(quotas) == 2 and quotas[0] == quotas[1]


def _select_keys(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key in keys}


def _find_schedule_fields_in_use(schedule: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """The fields that the rates of the first `step` steps follow from."""
    if step == 0:
        return ()
    decays_from = schedule["length"] - schedule["decay"] if "decay" in schedule else schedule["warmup"]
    return tuple(schedule) if step > decays_from + 1 else ("peak_lr", "warmup")


def _find_batch_fields_in_use(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """The fields that give the first `step` steps other batches or else, with the same, other rates."""
    before, after = (
        [(first, size) for first, size in batch["ramp"] or [[0, batch["tokens"]]] if first < step]
        for batch in (old, new)
    )
    if before != after:
        return "tokens", "ramp"
    factors = [
        [
            lr_scaling_factor(batch["lr_scaling"], size, batch["lr_reference_tokens"] or batch["tokens"])
            for _, size in before
        ]
        for batch in (old, new)
    ]
    return () if factors[0] == factors[1] else ("lr_scaling", "lr_reference_tokens")


def format_with_unit(path: str, value: Any) -> str:
    """A value of an identity as an operator reads it: `200 steps`, not `200`; never a dictionary."""
    if value is None:
        return "not there"
    if isinstance(value, Mapping):
        if {"first_step", "seq_len", "mixture"} <= value.keys():
            return _describe_phase_identity(value)
        given = {key: item for key, item in value.items() if item is not None}
        return (
            ", ".join(f"{key} {format_with_unit(f'{path}.{key}', item)}" for key, item in given.items())
            or "empty"
        )
    if path == "batch.ramp":
        return ", ".join(f"{tokens:,} tokens from step {step:,} on" for step, tokens in value)
    if path.startswith("chunk_tokens.") and isinstance(value, int):
        return f"{value:,} tokens"
    if isinstance(value, float) and "rope." in path:
        return f"{value:.10g}"
    unit = "steps" if path.endswith(".first_step") else _UNITS.get(path)
    if unit is None or not isinstance(value, int) or isinstance(value, bool):
        return show_value(value)
    return f"{value:,} {unit[:-1] if value == 1 else unit}"


def _describe_phase_identity(phase: Mapping[str, Any]) -> str:
    mixture = ", ".join(f"{weight:g} {name}" for name, weight in phase["mixture"].items())
    words = f"sequences of {phase['seq_len']:,} tokens of {mixture}, from step {phase['first_step']:,} on"
    return f"{words} (rope {format_with_unit('rope', phase['rope'])})" if phase.get("rope") else words


def find_config_differences(plan: Plan, base: Pretrained) -> Iterator[str]:
    """Find where an own model config contradicts the loaded model's: the weights would not fit."""
    if (own := base.folder / "config.json") == Path(plan.run.model.config):
        return
    theirs = parse_json(read_text(own, f"{plan.run_path}: model.pretrained"), str(own))
    for key, (before, now) in find_changed_fields(
        _normalize_config(theirs), _normalize_config(plan.model)
    ).items():
        yield (
            f"{plan.run_path}: model.config = {plan.run.model.config} says {key} = {show_value(now)}, and "
            f"{own} says {show_value(before)}; leave model.config out, or make them equal"
        )


def check_directory(
    plan: Plan, data: Mapping[str, str], known: KnownRun | None = None, origin: KnownRun | None = None
) -> list[str]:
    """Find why this plan cannot resume in its run directory; empty if it can, or if the directory is new.

    `data` describes the content of each source. `known` is what the newest checkpoint remembers: a kill may
    have come between its publication and the note of it in the record, and the record may be lost. `origin`
    is what the checkpoint at `resume_from` remembers that a run without either begins from: of another run
    all is compared, of this one, which continues elsewhere or is a copy of its own past, what lies before it.
    """
    try:
        record = read_record(plan.out)
    except InputError as error:
        return list(error.problems)
    if problem := check_folder(plan.out, f"{plan.run_path}: out"):
        return [problem]
    if record is None and (found := list_foreign_files(plan.out)) and not (plan.out / "checkpoints").exists():
        return [  # training would write over them; with checkpoints it is a run that lost its record
            f"{plan.run_path}: out = {plan.out} holds files that are not of a run ({found}); give an empty "
            "or a new folder"
        ]
    goes_on = record is None and known is None and origin is not None and origin.name == plan.run.name
    newest = origin if goes_on else known
    record = record or build_record_from_checkpoint(plan.run.name, known, origin)
    if record is None or (record.origin is not None and not record.identity):  # what is not ours says nothing
        return []
    steps = (record.saved_step, None if newest is None else newest.step)
    met = max((step for step in steps if step is not None), default=None)
    return find_differences(plan, replace(record, saved_step=met), data)


def find_differences(plan: Plan, record: RunRecord, data: Mapping[str, str]) -> list[str]:
    """Find where the plan contradicts the run's recorded past; names both values."""
    if record.name != plan.run.name:
        return [
            f"{plan.out} holds the run {record.name!r}, and {plan.run_path} is {plan.run.name!r}; give it "
            f"its own `out`"
        ]
    where = f"the run in {plan.out}" if record.origin is None else f"the run of {record.origin}"
    begun = {skip.phase for skip in read_rollback_log(plan.out).ledger.skips}
    try:
        changes = find_past_changes(record.identity, compute_identity(plan, data), record.saved_step, begun)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [
            f"{where} has an identity that cannot be read ({type(error).__name__}: {error}); put an intact "
            f"{RECORD} back: the manifest of each checkpoint has the same `identity`"
        ]
    chunks = {path: pair for path, pair in changes.items() if path.startswith("chunk_tokens.")}
    is_of_length = any(path.endswith(".seq_len") for path in changes)  # then that is what has changed
    read = {path.removeprefix("chunk_tokens."): pair for path, pair in chunks.items() if pair[0] is not None}
    old_chunks, new_chunks = ({name: pair[index] for name, pair in read.items()} for index in (0, 1))
    problems = [] if is_of_length else find_changed_chunks(old_chunks, new_chunks)
    problems += (
        f"{_describe_difference(path, *pair, where)}; {_suggest_way_back(plan, record, path)}"
        for path, pair in changes.items()
        if path not in chunks and not plan.accepts(path)
    )
    return [f"{plan.run_path}: {problem}" for problem in problems]


def _describe_difference(path: str, old: Any, new: Any, where: str) -> str:
    now = "no longer there" if new is None else format_with_unit(path, new)
    before = "without it" if old is None else f"with {format_with_unit(path, old)}"
    return f"`{path}` is {now}, but {where} was started {before}"


def _suggest_way_back(plan: Plan, record: RunRecord, path: str) -> str:
    if plan.may_change(path):
        return f'set it back, or accept it with accept_changes = ["{path}"]'
    if record.lineage is None or record.attempt:
        return "set it back, or start another run with a new `name` and `out`"
    return f"set it back: a branch has its parent's past, which goes up to step {record.lineage.step:,}"


def claim_run(
    plan: Plan, data: Mapping[str, str], known: KnownRun | None, origin: KnownRun | None = None
) -> RunRecord:
    """Count one more start of the run in its directory. On rank 0 only, which holds the lock.

    `known` is what the checkpoint to resume from remembers, None if there is none; `origin` is what another
    run's checkpoint remembers that this run begins from, which agrees with it in all but the name.

    Raises:
        InputError: the directory or the checkpoint is of another run, or the checkpoints are lost.
    """
    if problems := check_directory(plan, data, known, origin):
        raise InputError(problems)
    identity = compute_identity(plan, data)
    before = read_record(plan.out)
    if before is not None and known is not None and known.wandb_id not in (None, before.wandb_id):
        raise InputError(
            f"{known.folder} is a checkpoint of another run ({known.identity.get('name')!r}, "
            f"{known.wandb_id}), and {plan.out} holds {before.name!r} ({before.wandb_id}); move it out of "
            "there, or give it as resume_from to a run of its own"
        )
    if before is not None and before.saved_step is not None and known is None:
        raise InputError(describe_lost_checkpoints(plan.out, before.saved_step))
    record = before or build_record_from_checkpoint(plan.run.name, known, origin)
    record = record or RunRecord(plan.run.name, identity, 0, draw_run_id(), None)
    attempt = record.attempt + 1
    changes = find_changed_fields(record.identity or identity, identity)
    noted = (
        {"attempt": attempt, "field": path, "old": was, "new": now} for path, (was, now) in changes.items()
    )
    record = replace(
        record,
        attempt=attempt,
        identity=identity,
        changes=(*record.changes, *noted),
        overrides=plan.overrides,
    )
    write_record(plan.out, record)
    return record
