"""The numbers of a run, read from its files and from the output of `ds-pretrain audit`, and their comparison.

Nothing of `ds_pretrain` or DeepSpeed is imported here: runs of two versions of the trainer are read alike,
whatever either of them has renamed or moved.
"""

import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

STEPS, VALIDATIONS, EVENTS = "steps", "validation losses", "other events"
AUDIT, SAMPLES, SKIPPED = "audit counts", "sample ids", "skipped samples"
MASTERS, MOMENTS, SHARDS = "fp32 masters", "Adam moments", "other shard values"

# Fields and events of metrics.jsonl, and kinds named in them, that were renamed: the old name to the new one.
RENAMED: dict[str, str] = {
    "suspects": "high_loss_samples",
    "compared": "replay_compared",
    "dropped": "skipped_update",
    "wild_norm": "outlier_norm",
    "changed": "config_changed",
    "shipped": "upload",
    "needs_person": "needs_operator",
    "num_dropped": "num_skipped_updates",
    "in_a_row": "num_consecutive",
}
# What the machine did rather than the training: times, rates, sizes of files.
_OF_THE_MACHINE = re.compile(r"seconds?$|^time$|per_second|mfu|goodput|memory|bytes")
# Texts that are compared; all others (messages, paths, hosts) may be worded anew.
_KINDS = {"event", "phase", "trouble", "response", "action", "outcome", "finding", "cause"}
_NON_FINITE = {"nan", "inf", "-inf"}  # a string in JSON
_MOST_NAMED = 5
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_PLACE = re.compile(r"\b(rank|draw|epoch|sample|document)s?\W+(\d+(?:, \d+)*)")

Value: TypeAlias = "str | torch.Tensor"
Values: TypeAlias = dict[str, Value]  # by place
Numbers: TypeAlias = dict[str, Values]  # by kind


@dataclass(frozen=True)
class Comparison:
    """How two runs agree in one kind of number."""

    kind: str
    num_compared: int
    num_different: int  # a value that one side lacks is one of them
    named: tuple[str, ...] = ()  # the first differences, in words


def compare(kind: str, base: Values, now: Values) -> Comparison:
    """Compare two runs value by value, bit for bit."""
    num_compared = num_different = 0
    named: list[str] = []
    for place in dict.fromkeys([*base, *now]):
        if place in base and place in now:
            size, different, words = _compared(base[place], now[place])
        else:
            there, side = (base[place], "base") if place in base else (now[place], "now")
            size, different, words = 0, max(1, _size(there)), f"only in {side}: {_shown(there)}"
        num_compared += size
        num_different += different
        if different and len(named) < _MOST_NAMED:
            named.append(f"{place}: {words}")
    return Comparison(kind, num_compared, num_different, tuple(named))


def _compared(base: Value, now: Value) -> tuple[int, int, str]:
    """The number of values compared and of those that differ, and the first difference in words."""
    if isinstance(base, str) or isinstance(now, str):
        same = isinstance(base, str) and isinstance(now, str) and base == now
        return 1, int(not same), f"{_shown(base)} in base, {_shown(now)} now"
    if (base.dtype, base.shape) != (now.dtype, now.shape):
        size = max(1, base.numel(), now.numel())
        return size, size, f"{_shown(base)} in base, {_shown(now)} now"
    wrong = (_bits(base) != _bits(now)).any(dim=1).nonzero().reshape(-1).tolist()
    if not wrong:
        return base.numel(), 0, ""
    first, second = (side.reshape(-1)[wrong[0]].item() for side in (base, now))
    words = f"{len(wrong):,} of {base.numel():,}, first [{wrong[0]}]: {first!r} in base, {second!r} now"
    return base.numel(), len(wrong), words


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element: [N, bytes of one]."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _size(value: Value) -> int:
    return 1 if isinstance(value, str) else value.numel()


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else f"{value.dtype} {tuple(value.shape)}"


class _Number(str):
    """A number as its JSON text has it."""


def read_records(text: str, renamed: Mapping[str, str] = RENAMED) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; numbers stay text, so that comparing them compares their bits."""
    lines = (json.loads(line, parse_float=_Number, parse_int=_Number) for line in text.splitlines())
    return [_renamed(record, renamed) for record in lines]


def _renamed(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            renamed.get(name, name): renamed.get(inner, inner) if name in _KINDS else _renamed(inner, renamed)
            for name, inner in value.items()
        }
    return [_renamed(inner, renamed) for inner in value] if isinstance(value, list) else value


def of_records(records: Iterable[Mapping[str, Any]]) -> Numbers:
    """All that the records count or measure of training, times left out.

    A step that is taken again, after a rollback or a restart, is a value of its own.
    """
    numbers: Numbers = {STEPS: {}, VALIDATIONS: {}, EVENTS: {}}
    takes: Counter[tuple[str, str]] = Counter()
    for record in records:
        event, step = str(record["event"]), str(record.get("step"))
        takes[event, step] += 1
        kind = {"step": STEPS, "validation": VALIDATIONS}.get(event, EVENTS)
        place = f"{event} at step {step}, take {takes[event, step]}"
        numbers[kind].update((f"{place}: {name}", text) for name, text in _fields("", record))
    return numbers


def _fields(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The numbers, flags and kinds in a JSON value, with the path to each."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _OF_THE_MACHINE.search(key):
                yield from _fields(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _fields(f"{name}[{index}]", inner)
    elif not isinstance(value, str):
        yield name, json.dumps(value)  # true, false, null
    elif isinstance(value, _Number) or value in _NON_FINITE or name in _KINDS:
        yield name, str(value)


def of_audit(text: str) -> Values:
    """The counts in an audit's summary, by the word that its lines begin with."""
    values: Values = {}
    lines: Counter[str] = Counter()
    for line in text.splitlines():
        label, _, rest = line.strip().partition(" ")
        if label in ("", "ok", "not"):  # these name the folder, and the exit code says which
            continue
        lines[label] += 1
        for index, number in enumerate(_NUMBER.findall(rest)):
            values[f"{label} line {lines[label]}, number {index + 1}"] = number.replace(",", "")
    return values


def of_shown_step(step: int, text: str) -> Values:
    """The rank, draw, epoch, sample and documents of each sample that an audit shows of a step."""
    values: Values = {}
    num_samples = 0
    for line in text.splitlines():
        found = dict(_PLACE.findall(line))
        if {"draw", "epoch", "sample"} <= found.keys():
            num_samples += 1
            values.update((f"step {step}, its sample {num_samples}: {k}", v) for k, v in found.items())
    return values


def of_skipped(text: str) -> Values:
    """The numbers in each line of an audit's table of skipped samples."""
    rows = [line.split("\t") for line in text.splitlines() if "\t" in line]
    return {
        f"row {number}, column {column}": cell
        for number, row in enumerate(rows)
        for column, cell in enumerate(row)
        if cell.isdecimal()
    }


def of_last_checkpoint(out: Path) -> tuple[Numbers, int]:
    """Every tensor and number in DeepSpeed's shards of the newest checkpoint; how many ranks saved."""
    folders = {path.parent for path in out.rglob("*_optim_states.pt")}
    numbers: Numbers = {MASTERS: {}, MOMENTS: {}, SHARDS: {}}
    if not folders:
        return numbers, 0
    newest = max(
        folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", str(folder.relative_to(out)))]
    )
    shards = sorted(newest.glob("*_states.pt"))
    for shard in shards:
        for place, value in _tensors(shard.name, load_shard(shard)):
            numbers[_kind_of_tensor(place)][place] = value
    return numbers, sum(shard.name.endswith("_optim_states.pt") for shard in shards)


def _kind_of_tensor(place: str) -> str:
    if "fp32_flat_groups" in place or "single_partition_of_fp32_groups" in place:
        return MASTERS
    return MOMENTS if ".exp_avg" in place else SHARDS


def _tensors(place: str, value: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{place}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(f"{place}[{index}]", inner)
    elif isinstance(value, int | float):
        yield place, repr(value)


class _Unknown:
    """Stands in for an object of DeepSpeed's in a shard, which holds no weights."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Finds the classes of torch and of Python's collections, and imports nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = module.split(".")[0] in ("torch", "collections")
        return super().find_class(module, name) if known else _Unknown


def load_shard(path: Path) -> Any:
    """The content of a shard, without DeepSpeed."""
    reader: Any = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="run_numbers")
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=reader)
