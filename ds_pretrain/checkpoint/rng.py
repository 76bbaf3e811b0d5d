"""Each rank's random streams, saved and restored as plain types that load under `weights_only=True`."""

import hashlib
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_pretrain.core.distributed import uses_gpu
from ds_pretrain.core.errors import RunError

RNG = "rng"  # the folder of the streams in a checkpoint


def seed_streams(seed: int, rank: int) -> None:
    """Give this rank streams of its own: python, numpy, torch and the device."""
    _seed_all(f"rng:{seed}:{rank}")


def derive_streams(seed: int, step: int, rank: int) -> None:
    """Give a rank that a checkpoint knows nothing of streams that depend on the step of the run."""
    _seed_all(f"rng:{seed}:{step}:{rank}")


def _seed_all(words: str) -> None:
    value = int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little")
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - the legacy stream is the one that libraries draw from
    torch.manual_seed(value)  # CPU and every device


def capture_streams() -> dict[str, Any]:
    """The state of every stream, as tensors, numbers and lists."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if uses_gpu() else None,
    }


def restore_streams(streams: dict[str, Any]) -> None:
    """Put every stream back. What was saved without a device has nothing to restore on one."""
    python, numpy = streams["python"], streams["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    torch.set_rng_state(streams["torch"])
    if streams["device"] is not None and uses_gpu():
        torch.cuda.set_rng_state(streams["device"])


@contextmanager
def preserve_streams() -> Iterator[None]:
    """Put every stream back at the end, whatever was drawn meanwhile."""
    streams = capture_streams()
    try:
        yield
    finally:
        restore_streams(streams)


def rng_file(rank: int) -> str:
    """The path of a rank's random streams in a checkpoint."""
    return f"{RNG}/rank_{rank:05d}.pt"


def dump_streams() -> bytes:
    """Serialize this rank's random streams for a checkpoint."""
    content = io.BytesIO()
    torch.save(capture_streams(), content)
    return content.getvalue()


def load_streams(folder: Path, rank: int) -> None:
    """Restore this rank's streams from a checkpoint.

    Raises:
        RunError: the file is missing, is not ours, or holds more than plain types: never skipped.
    """
    path = folder / rng_file(rank)
    try:
        restore_streams(torch.load(path, weights_only=True, map_location="cpu"))
    except Exception as error:  # of pickle, zip, torch, or of what is inside
        raise RunError(
            f"the random streams of rank {rank} cannot be restored from {path} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}); "
            "put the file back as it was saved, or move this checkpoint away to use the one before it"
        ) from error
