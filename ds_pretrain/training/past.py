"""What of a plan has happened already, and so may not change any more; what lies ahead may.

Identities are those of `identity.identity_of`: plain types, with phases, batches and schedule in steps.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ds_pretrain.config.schedule import rule_factor
from ds_pretrain.config.schema import CosineSection, WsdSection
from ds_pretrain.config.timeline import steps
from ds_pretrain.core.text import changed_fields
from ds_pretrain.data.mixture import block_quotas

Changes = dict[str, tuple[Any, Any]]
_COMPARED_RATES = 1000  # evenly spread over the past, beside every corner of both schedules


def past_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], step: int | None, begun: Collection[str] = ()
) -> Changes:
    """Those of the changes that the first `step` steps would have met. None: all are.

    Phases that have `begun` count as met, also where the run was taken back to their first step: which of
    their samples are skipped was decided by what they read then.
    """
    changes = changed_fields(old, new)
    if step is None:
        return changes
    return {path: pair for path, pair in changes.items() if _touches(path, old, new, step, begun)}


def _touches(
    path: str, old: Mapping[str, Any], new: Mapping[str, Any], step: int, begun: Collection[str]
) -> bool:
    section, _, rest = path.partition(".")
    if section == "schedule":
        return rest in _altering(old[section], new[section], step)
    if section == "batch":
        return rest in _altering_batches(old[section], new[section], step)
    if section in ("chunk_tokens", "sources"):
        return any(
            rest in phase["mixture"] and (phase["first_step"] < step or name in begun)
            for identity in ((old,) if section == "chunk_tokens" else (old, new))
            for name, phase in identity["phases"].items()
        )
    if section == "phases":
        names = {*old[section], *new[section]}  # which may hold dots
        name = max((n for n in names if rest == n or rest.startswith(f"{n}.")), key=len)
        phases = [identity[section][name] for identity in (old, new) if name in identity.get(section, {})]
        is_past = bool(min(phase["first_step"] for phase in phases) < step)
        if name in begun and not is_past:
            return not rest.startswith(f"{name}.rope")  # which no draw depends on
        return is_past and not (rest.startswith(f"{name}.mixture.") and _draw_alike(phases))
    return True


def _draw_alike(phases: Iterable[Mapping[str, Any]]) -> bool:
    """True if weights are only written otherwise: what is drawn are whole draws of a block."""
    try:
        first, *others = (block_quotas(phase["mixture"]) for phase in phases)
    except (TypeError, ValueError):  # of another version
        return False
    return all(other == first for other in others)


def _altering_batches(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """The fields that give the first `step` steps other batches or else, with the same, other rates."""
    before, after = _met_batches(old, step), _met_batches(new, step)
    if [piece[:2] for piece in before] != [piece[:2] for piece in after]:
        return "tokens", "ramp"
    if before == after:
        return ()
    return ("rate_tokens",) if old.get("rate_rule") == new.get("rate_rule") else ("rate_rule",)


def rate_tokens_of_past(old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> int | None:
    """The `batch.rate_tokens` under which the rates of the first `step` steps stay what they were, if any."""
    batch, reach = old["batch"], sys.maxsize if step is None else step
    before = _met_batches(batch, reach)
    for tokens in (batch.get("rate_tokens", batch["tokens"]), *(size for _, size, _ in before)):
        if _met_batches({**new["batch"], "rate_tokens": tokens}, reach) == before:
            return int(tokens)
    return None


def rates_words(path: str, old: Mapping[str, Any], new: Mapping[str, Any], step: int | None) -> str:
    """Of a field that scales rates, why that is of the past, and the key that leaves the past as it is."""
    if path not in ("batch.rate_rule", "batch.rate_tokens"):
        return ""
    kept = rate_tokens_of_past(old, new, step)
    way_out = "" if kept is None else f"; batch.rate_tokens = {kept} leaves them as they were"
    return (
        ": the rule multiplies the rates of past steps by the size of their batch over batch.rate_tokens "
        f"(which is batch.tokens where the file does not say it), so they would be others{way_out}"
    )


def _met_batches(batch: Mapping[str, Any], step: int) -> list[tuple[int, int, float]]:
    """The batches that the first `step` steps had: first step, tokens, what the rate was multiplied by."""
    rule, full = batch.get("rate_rule", "none"), batch["tokens"]
    pieces, meant = batch.get("ramp") or [[0, full]], batch.get("rate_tokens", full)
    return [(first, size, rule_factor(rule, size, meant)) for first, size in pieces if first < step]


def _altering(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> list[str]:
    """The fields that alter rates of the past: those that do alone, or all where it takes several."""
    if _same_rates(old, new, step):
        return []
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    alone = [
        key
        for key in changed
        if key not in old or key not in new or not _same_rates(old, {**old, key: new[key]}, step)
    ]
    return alone or changed


def _same_rates(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> bool:
    try:
        schedules = [_schedule(section) for section in (old, new)]
    except (KeyError, TypeError, ValueError):  # of another version
        return False
    steps = {step * index // _COMPARED_RATES for index in range(_COMPARED_RATES)} | {max(0, step - 1)}
    steps |= {corner for schedule in schedules for corner in schedule.corners().values()}
    return all(_same_rate(schedules, at) for at in steps if at < step)


def _schedule(section: Mapping[str, Any]) -> CosineSection | WsdSection:
    durations = {key: steps(section[key]) for key in ("length", "warmup", "decay") if key in section}
    kinds: dict[str, type[CosineSection | WsdSection]] = {"wsd": WsdSection, "cosine": CosineSection}
    return kinds[section["kind"]].model_validate({**section, **durations})


def _same_rate(schedules: Iterable[CosineSection | WsdSection], step: int) -> bool:
    rates = {schedule.rate(step) if step < schedule.length.steps else None for schedule in schedules}
    return len(rates) == 1
