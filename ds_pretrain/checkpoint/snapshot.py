"""Copy to host memory, write behind.

DeepSpeed hands each file of this rank to `capture` instead of writing it. Tensors are copied into buffers
that are used again for the next save; a thread then writes them, sums them as they stream, and syncs each
file.
Masters and moments change only in the optimizer's step. So where they lie in host memory the thread copies
them too, while the next forward and backward run, and the next step waits for it. All else is copied before
training continues: the copy is of one instant.
"""

import copy
import errno
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from ds_pretrain.checkpoint.manifest import FileEntry
from ds_pretrain.core.distributed import uses_gpu
from ds_pretrain.core.files import free_bytes, write_point

Buffers = dict[tuple[str, int], Tensor]  # host copies, kept from save to save
LATER_BYTES = 1 << 20  # smaller tensors are copied at once: what else is in DeepSpeed's files may change


class Snapshot:
    """One rank's files of one save, copied to host memory, ready to be written on any thread."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._taken: list[tuple[Path, Any]] = []
        self._later: list[tuple[Tensor, Tensor]] = []  # buffer, what it shall hold
        self._copied_all = threading.Event()
        self.waited_seconds = 0.0  # that training stood still in `wait`

    def capture(self, value: Any, path: Path) -> Callable[[], None]:
        """Take what will be written to `path`; before any master or moment of it changes, call the result.

        Tensors that share memory share their copy.
        """
        self._taken.append((path, self._copied(value, path.name, {})))
        return self.wait

    def add(self, content: bytes, path: Path) -> None:
        """Write `content` to `path` as it is, together with what was captured."""
        self._taken.append((path, content))

    def wait(self) -> None:
        """Return when all that was captured is copied."""
        began = perf_counter()
        self._copied_all.wait()
        self.waited_seconds += perf_counter() - began

    def abandon(self) -> None:
        """Give up the snapshot: nothing will be written, and waiters are released."""
        self._later.clear()
        self._copied_all.set()

    def write(self) -> dict[Path, FileEntry]:
        """Copy the rest, then write all of it; size and checksum of each file, once it is on disk."""
        try:
            for buffer, tensor in self._later:
                buffer.copy_(tensor)
        finally:
            self.abandon()
        return {path: write_summed(path, value) for path, value in self._taken}

    def settle(self) -> None:
        """Wait for copies that the device has not finished."""
        if uses_gpu():
            torch.cuda.synchronize()

    def _copied(self, value: Any, name: str, copies: dict[tuple[Any, ...], Tensor]) -> Any:
        if isinstance(value, Tensor):
            identity = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
            if identity not in copies:
                copies[identity] = self._buffered(value, (name, len(copies)))
            return copies[identity]
        if isinstance(value, dict):
            return type(value)((key, self._copied(item, name, copies)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, name, copies) for item in value)
        return copy.deepcopy(value)

    def _buffered(self, tensor: Tensor, key: tuple[str, int]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        is_state = key[0].endswith("_optim_states.pt")  # masters and moments
        if is_state and tensor.device.type == "cpu" and tensor.nbytes >= LATER_BYTES:
            self._later.append((buffer, tensor.detach()))
        else:
            buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer


def write_summed(path: Path, value: Any) -> FileEntry:
    """Write bytes, or anything that torch can save, to `path`; synced, and summed while it streams.

    Raises:
        OSError: as the file system said it; torch alone would hide it behind a message of its own. Of a full
            disk also what the file needs, and what there is.
    """
    write_point(f"write {path.name}")
    try:
        with path.open("wb") as file:
            summed = _Summed(file)
            try:
                if isinstance(value, bytes):
                    summed.write(value)
                else:
                    torch.save(value, cast(BinaryIO, summed))
            except RuntimeError:
                if summed.error is not None:
                    raise summed.error from None
                raise
            file.flush()
            write_point(f"sync {path.name}")
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed, free = _count_bytes(value, set()), free_bytes(path.parent)
        raise OSError(
            error.errno,
            f"{error.strerror}: {path.name} needs {needed:,} bytes, and its disk has {free:,} left",
        ) from None
    return FileEntry(summed.num_bytes, summed.digest.hexdigest())


def _count_bytes(value: Any, seen: set[int]) -> int:
    """Estimate the bytes of the file of `value`: its tensors, each counted once."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Tensor):
        is_new = value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.nbytes if is_new else 0
    if isinstance(value, dict):
        return sum(_count_bytes(item, seen) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_count_bytes(item, seen) for item in value)
    return 0


class _Summed:
    """A file that is only written forwards, and knows its checksum and its error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()
