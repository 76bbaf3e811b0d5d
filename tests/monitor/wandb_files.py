"""Reads what the real W&B client left on disk in offline mode: a LevelDB log of protobuf records.

Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, after W&B's own file header of 7 bytes.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 32_768
_FILE_HEADER = 7


@dataclass(frozen=True)
class OfflineRun:
    """One start of a run, as its .wandb file holds it."""

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]


def offline_runs(out: Path) -> list[OfflineRun]:
    """Every start under `out`, in the order of their first point."""
    runs = [_read(path) for path in (out / "wandb").glob("offline-run-*/*.wandb")]
    return sorted(runs, key=lambda run: run.history[0]["_step"] if run.history else -1)


def _read(path: Path) -> OfflineRun:
    from wandb.proto import wandb_internal_pb2

    run_id, project, config, history = "", "", {}, []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if kind == "history":
            items = record.history.item
            history.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    return OfflineRun(run_id, project, config, history)


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == b":W&B"
    position, parts = _FILE_HEADER, b""
    while position + 7 <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # FULL, LAST
            yield parts
            parts = b""
