"""The remote that checkpoints are uploaded to: a folder, or an object store through fsspec.

A checkpoint there has the names that it has here, under `place/step_NNNNNNNNN/`, and is one if and only if
its `manifest.json` is there. Nothing is believed that was not read back: what a store says of a file is not
asked. No listing is kept between calls.
"""

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ds_pretrain.checkpoint.manifest import MANIFEST, FileEntry, parse_step, step_name
from ds_pretrain.core.distributed import read_environment_values
from ds_pretrain.core.errors import InputError
from ds_pretrain.core.files import copy_beside, make_synced, sync_folder, write_atomic, write_point
from ds_pretrain.core.redact import find_secret_options, is_secret, scrub

_CHUNK_BYTES = 1 << 24
_UPLOADS_AT_ONCE = 4  # parts of one file: s3fs holds so many parts of 50 MB in memory
# Stores without folders: to ask them for one could create a bucket.
_WITHOUT_FOLDERS = frozenset(["s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "memory"])
_ABSENT = (FileNotFoundError, NotADirectoryError)  # a file may have a checkpoint's name
_LABEL = "run.json"
_LONGEST_REASON = 500  # characters


@dataclass(frozen=True)
class Remote:
    """A place for copies of checkpoints. What its methods raise is an OSError without credentials in it."""

    location: str
    _fs: Any
    _root: str

    def list_steps(self) -> list[int]:
        """The steps of the checkpoints there, newest first."""
        return [step for step in self.list_folders() if self.get_size(step, MANIFEST) is not None]

    def list_folders(self) -> list[int]:
        """The steps of which anything is there, newest first; without a manifest they are no checkpoints."""
        return sorted({step for name in self._names(self._root) if (step := parse_step(name)) is not None})[
            ::-1
        ]

    def list_names(self, step: int) -> list[str]:
        """List the names directly in the folder of a step."""
        return self._names(self._path(step))

    def list_unfinished(self, step: int) -> list[str]:
        """List the temporary files of a step: left by killed uploads, or about to be renamed."""
        if not self._is_local:
            return []  # an object is there once it is whole
        folder = Path(self._path(step))
        with self._said("list what is there"):
            found = [path for path in folder.rglob(".*") if path.is_file()]
        return sorted(path.relative_to(folder).as_posix() for path in found)

    def get_size(self, step: int, name: str) -> int | None:
        """The bytes of a file; None if it is not there."""
        with self._said(f"look at {name} of step {step}"):
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(self._path(step, name))["size"])
            except _ABSENT:
                return None

    def read(self, step: int, name: str) -> bytes | None:
        """A small file; None if it is not there."""
        with self._said(f"read {name} of step {step}"):
            try:
                return bytes(self._fs.cat_file(self._path(step, name)))
            except _ABSENT:
                return None

    def write(self, step: int, name: str, content: bytes) -> None:
        """A small file, replaced."""
        with self._said(f"write {name} of step {step}"):
            self._replace(self._in_folder(step, name), content)

    def read_label(self) -> bytes | None:
        """Read the label, which names the run whose checkpoints lie here; None without a label."""
        with self._said(f"read {_LABEL}"):
            try:
                return bytes(self._fs.cat_file(f"{self._root}/{_LABEL}")) or None
            except FileNotFoundError:
                return None

    def write_label(self, content: bytes) -> None:
        """Say whose checkpoints lie here."""
        with self._said(f"write {_LABEL}"):
            self._replace(f"{self._root}/{_LABEL}", content)

    def upload(self, path: Path, step: int, name: str) -> FileEntry:
        """Upload a file of any size, and sum what arrived by reading it back."""
        with self._said(f"upload {name} of step {step}"):
            there = self._in_folder(step, name)
            if self._is_local:
                unfinished = copy_beside(path, Path(there))
                write_point("remote copied")
                unfinished.replace(there)
                sync_folder(unfinished.parent)
            else:
                self._fs.put_file(str(path), there)
        arrived = self.entry(step, name)
        if arrived is None:
            raise OSError(f"{self.location}: {name} of step {step} is not there after its upload")
        return arrived

    def entry(self, step: int, name: str) -> FileEntry | None:
        """Size and checksum of a file, by reading all of it; None if it is not there."""
        try:
            return self._summed(step, name, None)
        except FileNotFoundError:
            return None

    def download(self, step: int, name: str, path: Path) -> FileEntry:
        """Download to `path`, synced; what arrived is summed while it streams.

        Raises:
            OSError: it is not there, cannot be read to its end, or cannot be written here. What has been
                written by then is left.
        """
        with path.open("wb") as file:
            arrived = self._summed(step, name, file)
            file.flush()
            os.fsync(file.fileno())
        return arrived

    def remove(self, step: int, name: str) -> None:
        """Remove one file; that it is not there is no error."""
        with self._said(f"remove {name} of step {step}"):
            try:
                self._fs.rm_file(self._path(step, name))
            except FileNotFoundError:
                return
            if self._is_local:
                sync_folder(Path(self._path(step)))

    def delete(self, step: int) -> None:
        """Remove the manifest, so that the folder is no checkpoint any more, then the rest."""
        self.remove(step, MANIFEST)
        write_point("remote delete")
        with self._said(f"delete step {step}"):
            try:
                self._fs.rm(self._path(step), recursive=True)
            except FileNotFoundError:
                return

    @property
    def _is_local(self) -> bool:
        return "file" in _list_protocols(self._fs)

    def _replace(self, path: str, content: bytes) -> None:
        if self._is_local:
            write_atomic(Path(path), content)
        else:
            self._fs.pipe_file(path, content)

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{step_name(step)}" + (f"/{name}" if name else "")

    def _in_folder(self, step: int, name: str) -> str:
        """The path of a file whose folder is there."""
        path = self._path(step, name)
        if self._is_local:
            make_synced(Path(path).parent)
        elif not _list_protocols(self._fs) & _WITHOUT_FOLDERS:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def _names(self, folder: str) -> list[str]:
        with self._said("list what is there"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(folder, detail=False)
            except FileNotFoundError:
                return []
            return [
                path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != folder.strip("/")
            ]

    def _summed(self, step: int, name: str, to: BinaryIO | None) -> FileEntry:
        digest, num_bytes = hashlib.sha256(), 0
        with self._said(f"read {name} of step {step}"):
            self._fs.invalidate_cache()
            with self._fs.open(
                self._path(step, name), "rb", block_size=_CHUNK_BYTES, cache_type="none"
            ) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    if to is not None:
                        to.write(chunk)
        return FileEntry(num_bytes, digest.hexdigest())

    @contextmanager
    def _said(self, doing: str) -> Iterator[None]:
        """Turn any error of a library into an OSError that may be shown."""
        try:
            yield
        except Exception as error:
            raise _classify_error(error)(
                f"{self.location}: cannot {doing}: {_describe_error(error, self._fs)}"
            ) from None


def open_remote(location: str) -> Remote:
    """Open a folder or an fsspec URL, and prove that it can be written and read.

    Raises:
        InputError: its kind of store is unknown or not installed, or it cannot be reached or written.
    """
    setting = _name_setting(location)
    fs, root = _open(location, setting)
    probe = f"{root}/.ds_pretrain-probe-{uuid.uuid4().hex}"
    content = b"written by ds_pretrain to see that checkpoints can be copied here\n"
    try:
        if not _list_protocols(fs) & _WITHOUT_FOLDERS:
            fs.makedirs(root, exist_ok=True)
        fs.pipe_file(probe, content)
        found = fs.cat_file(probe)
        fs.rm_file(probe)
    except Exception as error:
        raise InputError(
            f"{setting}: a small object cannot be written, read and removed there "
            f"({_describe_error(error, fs)}); check that the location exists and that this host's "
            f"credentials may write and delete there"
        ) from None
    if found != content:
        raise InputError(f"{setting}: what was written there reads back as something else; choose another")
    return Remote(location, fs, root)


def reopen_remote(location: str) -> Remote:
    """A place that another rank has opened and proved. Raises InputError as `open_remote` does."""
    return Remote(location, *_open(location, _name_setting(location)))


def open_folder_as_remote(folder: Path) -> Remote:
    """A folder of this host."""
    return reopen_remote(str(folder.absolute()))


def hide_secrets(text: str, options: object = None) -> str:
    """`text` without the credentials of this process's environment, and those in a store's options."""
    return scrub(text, (*read_environment_values(is_secret), *find_secret_options(options)))


def _name_setting(location: str) -> str:
    return f"checkpoint.upload_to = {hide_secrets(location)}"


def _open(location: str, setting: str) -> tuple[Any, str]:
    """The file system of a place, and its path there."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import available_protocols, known_implementations

    if "://" not in location:
        return LocalFileSystem(skip_instance_cache=True), str(Path(location).absolute())
    protocol = location.partition("://")[0]
    if protocol not in available_protocols():
        raise InputError(
            f"{setting}: {protocol}:// is not a protocol that fsspec knows; write a folder, or a URL like s3://bucket/folder"
        )
    try:
        fs, root = url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        package = known_implementations.get(protocol, {"class": "fsspec"})["class"].partition(".")[0]
        wanted = f"the package {package}" if package != "fsspec" else f"a package ({error})"
        raise InputError(
            f"{setting}: {protocol}:// needs {wanted}, which is not installed; install it on every host "
            f"(pip install {package if package != 'fsspec' else 'NAME'}), or use another location"
        ) from None
    except Exception as error:
        raise InputError(
            f"{setting}: it cannot be opened ({_describe_error(error, None)}); check the URL and the "
            "configuration of the store on this host"
        ) from None
    if hasattr(fs, "max_concurrency"):
        fs.max_concurrency = _UPLOADS_AT_ONCE
    return fs, root.rstrip("/")


def _list_protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _classify_error(error: Exception) -> type[OSError]:
    kinds = (FileNotFoundError, NotADirectoryError, PermissionError, TimeoutError, ConnectionError)
    return next((kind for kind in kinds if isinstance(error, kind)), OSError)


def _describe_error(error: Exception, fs: Any) -> str:
    """One line that says what happened, and no credential."""
    words = " ".join(str(error).split())
    text = words if isinstance(error, OSError) and words else f"{type(error).__name__}: {words}".rstrip(": ")
    return hide_secrets(text, getattr(fs, "storage_options", None))[:_LONGEST_REASON]
