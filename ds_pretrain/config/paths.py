"""Paths of the run file, checked as text: what no file system can mean by them is refused."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from ds_pretrain.core.text import shown


def path_text(value: str) -> str:
    """A path as it was written. Raises ValueError if it is empty, begins with ~ or holds a null character."""
    if not value.strip():
        raise ValueError(f"{shown(value)} is empty; write a path")
    if "\0" in value:
        raise ValueError(f"{shown(value)} holds a null character; write a path")
    if value.startswith("~"):
        raise ValueError(
            f"{shown(value)} begins with ~, which only a shell replaces by the home folder; "
            "write the whole path"
        )
    return value


def folder_text(value: str) -> str:
    """A folder of this host. Raises ValueError if it is a URL, or no path."""
    if "://" in value:
        raise ValueError(
            f"{shown(value)} is a URL; write a folder of the host itself, like /nvme/checkpoints"
        )
    return path_text(value)


def source_prefix(value: str) -> str:
    """The common prefix of a `.bin`/`.idx` pair. Raises ValueError if it is no path, or ends in no name."""
    if Path(path_text(value)).name in ("", ".."):
        raise ValueError(
            f"{shown(value)} names no file; write the common prefix of a .bin/.idx pair, like data/web"
        )
    return value


def place_text(value: str) -> str:
    """A folder, or a URL like s3://bucket/folder. Raises ValueError if it holds a credential, unshown.

    The run file is kept in every checkpoint: what must stay secret may not stand in it.
    """
    if "://" not in value:
        if re.match(r"[a-z][a-z0-9+.-]+:/", value):
            raise ValueError(
                f"{shown(value)} has one slash after the colon; write a URL like s3://bucket/folder"
            )
        return path_text(value)
    if value.startswith("file://"):
        raise ValueError(f"{shown(value)} is a folder; write it as one, like {value.removeprefix('file://')}")
    scheme = value.partition("://")[0]
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ValueError(f"{shown(scheme)} is no kind of URL; write one like s3://bucket/folder")
    try:
        parts = urlsplit(value)
    except ValueError:
        raise ValueError(
            f"it is no {scheme} URL that can be read; write one like s3://bucket/folder"
        ) from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"the {scheme} URL holds a user, a password or a query (not shown here); the run file is kept in "
            "every checkpoint: leave them to the environment or to the store's own configuration files, and "
            "write only the place, like s3://bucket/folder"
        )
    if not parts.netloc and not parts.path.strip("/"):
        raise ValueError(f"{shown(value)} names no place; write one like s3://bucket/folder")
    return value
