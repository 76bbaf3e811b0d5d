"""The write points that runs are killed at, and what is left on disk."""

import ast
from dataclasses import dataclass
from pathlib import Path

from ds_pretrain.checkpoint import reshard as reshard_module
from ds_pretrain.checkpoint.manifest import PARTIAL, list_published, parse_step
from ds_pretrain.checkpoint.restore import find_damage
from ds_pretrain.core.jsonl import read_metrics

PACKAGE = Path(reshard_module.__file__).parents[1]
# These pass their write points in a process of their own, which does not train.
SHIPPING_MODULES = {"ds_pretrain.checkpoint.upload", "ds_pretrain.checkpoint.remote"}


def write_points() -> dict[str, set[str]]:
    """The name of every write point by the module that passes it, read from the source; `*` is a variable."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "write_point":
                found.setdefault(module, set()).add(_pattern(node.args[0]))
    return found


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)
    assert isinstance(name, ast.Constant), "a write point is named by a literal, so that it can be listed"
    return str(name.value)


@dataclass(frozen=True)
class Left:
    """What a run directory holds."""

    newest: int  # step of the newest intact checkpoint; 0 if there is none
    under_way: int  # step of the newest save that was begun and not published; 0 if there is none
    trained: int  # the last step that was recorded
    torn: tuple[str, ...]  # what says that it is a checkpoint and is none


def look(out: Path) -> Left:
    """Read a run directory that nobody writes to, as any other program would."""
    root = out / "checkpoints"
    folders = {parse_step(folder.name) or 0: find_damage(folder) for folder in list_published(root)}
    torn = [f"step {step}: {reason}" for step, reason in folders.items() if reason is not None]
    if (root / "latest").exists():
        named = parse_step((root / "latest").read_text().strip())
        if named not in folders or folders[named] is not None:
            torn.append(f"latest names {(root / 'latest').read_text()!r}")
    intact = [step for step, reason in folders.items() if reason is None]
    unfinished = [parse_step(path.name.removesuffix(PARTIAL)) or 0 for path in root.glob(f"*{PARTIAL}")]
    metrics = out / "metrics.jsonl"
    steps = [r["step"] for r in read_metrics(metrics) if r["event"] == "step"] if metrics.exists() else []
    return Left(max(intact, default=0), max(unfinished, default=0), steps[-1] if steps else 0, tuple(torn))


def lost(before: Left, after: Left, interval: int) -> str | None:
    """What a kill cost that it may not cost: a checkpoint that was there, or more than one interval.

    The interval counts from the save that was under way: steps trained while it was being written come on
    top, for training does not wait.
    """
    if after.newest < before.newest:
        return f"checkpoint step {before.newest} is gone, the newest is of step {after.newest}"
    reached = after.under_way if after.under_way > after.newest else after.trained
    if reached - after.newest > interval:
        return f"step {reached} was reached, and the newest checkpoint is of step {after.newest}"
    return None
