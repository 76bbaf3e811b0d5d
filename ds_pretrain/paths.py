"""Paths of the run file, checked as text: what no file system can mean by them is refused."""

from pathlib import Path

from ds_pretrain.reading import shown


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


def source_prefix(value: str) -> str:
    """The common prefix of a `.bin`/`.idx` pair. Raises ValueError if it is no path, or ends in no name."""
    if Path(path_text(value)).name in ("", ".."):
        raise ValueError(
            f"{shown(value)} names no file; write the common prefix of a .bin/.idx pair, like data/web"
        )
    return value
