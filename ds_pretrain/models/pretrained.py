"""The weights of a public model that a run begins with: what its safetensors files hold, by their headers.

Format: https://huggingface.co/docs/safetensors (eight bytes of length, a JSON header, then the tensors). Only
headers and a few samples are read here; no torch.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_pretrain.core.errors import InputError
from ds_pretrain.core.text import parse_json, read_text, shown

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file
_MOST_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # of its numbers, as the format names them: F32, BF16, I64, ...


@dataclass(frozen=True)
class Base:
    """A folder with the weights of a model."""

    folder: Path
    tensors: Mapping[str, Stored]
    fingerprint: str  # of every name, shape and type, and of samples of the values: other weights differ


def read_base(folder: Path, setting: str) -> Base:
    """What is there. `setting` names the key of the run file.

    Raises:
        InputError: no such folder, no safetensors in it, or files that are missing or cut short.
    """
    if not folder.is_dir():
        raise InputError(
            f"{setting} = {folder} is no folder; name one with a config.json and safetensors, as "
            "`hf download NAME --local-dir FOLDER` or save_pretrained make it"
        )
    tensors: dict[str, Stored] = {}
    problems: list[str] = []
    digest = hashlib.sha256()
    for file in _files(folder, setting):
        try:
            header = _header(file)
            digest.update(json.dumps(header, sort_keys=True).encode())
            for sample in _samples(file):
                digest.update(sample)
        except (OSError, ValueError) as error:
            problems.append(f"{setting}: {file} cannot be used ({error}); download it again")
            continue
        tensors |= {
            name: Stored(file, tuple(entry["shape"]), entry["dtype"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    if problems:
        raise InputError(problems)
    return Base(folder, tensors, digest.hexdigest()[:32])


def _files(folder: Path, setting: str) -> list[Path]:
    if (folder / _INDEX).is_file():
        return [folder / name for name in _indexed(folder / _INDEX, setting)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    pickles = any(folder.glob("pytorch_model*.bin"))
    found = "only pickles (pytorch_model.bin), which can run code" if pickles else "neither"
    raise InputError(
        f"{setting}: {folder} should hold {_SINGLE} or {_INDEX}, and has {found}"
        + ("; convert it with save_pretrained" if pickles else "; name a model's own folder")
    )


def _indexed(path: Path, setting: str) -> list[str]:
    """The files that an index names."""
    index = parse_json(read_text(path, setting), f"{setting}: {path}")
    files = index.get("weight_map")
    if isinstance(files, Mapping) and files and all(isinstance(file, str) for file in files.values()):
        return sorted(set(files.values()))
    found = f"found {shown(files)}" if "weight_map" in index else f"it has {shown(list(index))} alone"
    raise InputError(
        f'{setting}: {path} should have a "weight_map", which says in which file each tensor is; {found}: '
        "download it again"
    )


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", _exactly(opened.read(8), 8))
        if length > _MOST_HEADER_BYTES:
            raise ValueError("it does not begin as a safetensors file does")
        header = json.loads(_exactly(opened.read(length), length))
    try:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
        assert all(isinstance(entry["dtype"], str) and isinstance(entry["shape"], list) for entry in entries)
    except (AssertionError, AttributeError, LookupError, TypeError) as error:
        raise ValueError("its header is not one of safetensors") from error
    if (size := file.stat().st_size) != end:
        raise ValueError(f"it has {size:,} bytes, its header says {end:,}")
    return dict(header)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("it ends in its header")
    return data


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        for index in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            yield opened.read(_SAMPLE_BYTES)
