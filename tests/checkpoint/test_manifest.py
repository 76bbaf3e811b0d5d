"""The names in a checkpoint, and the manifest that makes a folder one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint.manifest import (
    FileEntry,
    Manifest,
    UnknownVersion,
    list_published,
    owner_rank,
    parse_manifest,
    parse_step,
    seal,
    step_name,
)

MANIFEST = Manifest(
    step=3,
    tokens=384,
    samples=24,
    world_size=2,
    zero_stage=3,
    versions={"deepspeed": "0.19.8"},
    created="2026-01-01T00:00:00+00:00",
    attempt=1,
    wandb_id="abc",
    overrides=("seed=8",),
    identity={"name": "tiny"},
    files={"run_state.json": FileEntry(5, "00"), "rng/rank_00001.pt": FileEntry(7, "11")},
)
FIELDS = {key: value for key, value in json.loads(MANIFEST.to_json()).items() if key != "sha256"}


def _changed(**changes: Any) -> str:
    return seal(FIELDS | changes)


def _without(key: str) -> str:
    return seal({name: value for name, value in FIELDS.items() if name != key})


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert parse_manifest(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.total_bytes == 12
    assert parse_manifest(replace(MANIFEST, wandb_id=None).to_json()).wandb_id is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (MANIFEST.to_json()[:-20], "delimiter|Expecting|Unterminated"),
        ("[1]", "has no version"),
        ("7", "has no version"),
        (_changed(version=1), "has format 1, expected 3"),
        (_without("version"), "has no version"),
        (_without("files"), "lacks or does not know a field: `files"),
        (_without("step"), "lacks or does not know a field"),
        (_without("overrides"), "lacks or does not know a field"),
        (_changed(color="red"), "lacks or does not know a field: .*color"),
        (_changed(files=["a"]), "lacks or does not know a field"),
        (_changed(files={"a": {"bytes": 1}}), "lacks or does not know a field: .*sha256"),
        (_changed(files={"a": {"bytes": "1", "sha256": "0"}}), "lacks or does not know a field: .*a.bytes"),
        (_changed(files={"a": {"bytes": 1, "sha256": None}}), "lacks or does not know a field: .*a.sha256"),
        (_changed(world_size="2"), "lacks or does not know a field: `world_size"),
        (_changed(files={"a": {"bytes": 1, "sha256": "0"}}), "does not list run_state.json"),
        (MANIFEST.to_json().replace('"step": 3', '"step": 9'), "does not match its own checksum"),
    ],
)
def test_what_is_no_manifest_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_manifest(text)


@pytest.mark.parametrize("text", [_changed(version=1), _changed(color="red"), _without("step")])
def test_a_manifest_that_is_as_it_was_written_is_of_another_version_and_not_broken(text: str) -> None:
    with pytest.raises(UnknownVersion):
        parse_manifest(text)


@pytest.mark.parametrize("name", ["/etc/passwd", "../step_000000001/run.toml", "rng/../../x", "a\0b"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="which lies outside the folder"):
        parse_manifest(_changed(files={name: {"bytes": 1, "sha256": "0"}}))


def test_step_names_sort_as_steps_do_and_read_back() -> None:
    assert step_name(1000) == "step_000001000"
    assert [parse_step(step_name(step)) for step in (0, 7, 10**9, 10**12)] == [0, 7, 10**9, 10**12]
    assert [
        parse_step(name) for name in ("step_000000003.partial", "step_000000003.broken", "step_3", "latest")
    ] == [None] * 4


def test_published_lists_checkpoints_only_the_newest_first(tmp_path: Path) -> None:
    assert list_published(tmp_path / "nothing") == []
    for name in (
        step_name(3),
        step_name(20),
        step_name(10**9),
        "step_000000050.partial",
        "step_000000040.broken",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").write_text("x")
    assert [path.name for path in list_published(tmp_path)] == [step_name(10**9), step_name(20), step_name(3)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
        ("zero_pp_rank_12_mp_rank_00_model_states.pt", 12),
        ("mp_rank_00_model_states.pt", 0),
        ("rng/rank_00007.pt", 7),
        ("run_state.json", 0),
    ],
)
def test_a_file_belongs_to_the_rank_in_its_name(name: str, rank: int) -> None:
    assert owner_rank(name) == rank
