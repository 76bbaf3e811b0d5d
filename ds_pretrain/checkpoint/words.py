"""What hosts say to one another at a place: which files have arrived, and what can never arrive."""

import json
from dataclasses import dataclass

from ds_pretrain.checkpoint.remote import Remote
from ds_pretrain.checkpoint.unshippable import GivenUp, given_up, giving_up

ARRIVED = "arrived_"  # how the names of words begin
UNSHIPPABLE_THERE = "unshippable.json"


class Stuck(Exception):
    """A checkpoint cannot become whole at the place as things are; no try of this host alone changes that."""


def arrival(host: int) -> str:
    """The name of a host's word that its files are at the place."""
    return f"{ARRIVED}{host:05d}.json"


@dataclass(frozen=True)
class Word:
    """What a host said to have delivered, and of which save."""

    manifest: str
    files: frozenset[str]


def words_of(remote: Remote, step: int) -> dict[str, Word]:
    """All words of a step, by their names."""
    names = [name for name in remote.names(step) if name.startswith(ARRIVED)]
    return {name: word for name in names if (word := word_of(remote, step, name)) is not None}


def word_of(remote: Remote, step: int, name: str) -> Word | None:
    """A host's word; None as long as there is none that can be read."""
    try:
        told = json.loads(remote.read(step, name) or b"{}")
        return Word(str(told["manifest"]), frozenset(told["files"]))
    except (ValueError, TypeError, KeyError):
        return None


def told_of(remote: Remote, step: int, this_save: str) -> GivenUp | None:
    """Why this very save cannot become whole at the place, as far as a host has said so."""
    return given_up(remote.read(step, UNSHIPPABLE_THERE), this_save)


def tell_others(remote: Remote, step: int, this_save: str, reason: str, is_final: bool) -> None:
    """Say at the place that this very save cannot become whole there, or not as things are."""
    told = giving_up(this_save, reason, is_final).encode()
    if remote.read(step, UNSHIPPABLE_THERE) != told:
        remote.write(step, UNSHIPPABLE_THERE, told)


def ask_others(remote: Remote, step: int, this_save: str) -> None:
    """Raise Stuck if another host has said that this very save cannot become whole."""
    if told := told_of(remote, step, this_save):
        raise Stuck(f"another host says: {told.reason}")
