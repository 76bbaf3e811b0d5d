"""The `checkpoints` command: what a person sees of checkpoints, and may do to them."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ds_pretrain.checkpoint import inventory
from ds_pretrain.checkpoint.inventory import (
    VERIFIED,
    find_remote_problem,
    format_age,
    format_bytes,
    format_inventory,
    list_remote_entries,
)
from ds_pretrain.checkpoint.manifest import MANIFEST, parse_manifest, step_name
from ds_pretrain.checkpoint.remote import reopen_remote
from ds_pretrain.checkpoint.retention import KNOWN_GOOD, UPLOADED, manifest_checksum
from ds_pretrain.commands.cli import main
from ds_pretrain.config.plan import load_plan
from ds_pretrain.core.distributed import World
from tests.checkpoint.test_restore import _save as save
from tests.scenario import make_run


def made(folder: Path) -> Path:
    for step in (10, 20):
        save(folder / "out" / "checkpoints", step, World())
    return folder / "out"


def cells(line: str) -> list[str]:
    """The columns of a line of the table."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def table(root: Path, later: timedelta = timedelta()) -> list[str]:
    """The list, seen that much after the first checkpoint was made."""
    manifest = parse_manifest((root / step_name(10) / MANIFEST).read_text())
    return list(format_inventory(root, datetime.fromisoformat(manifest.created) + later))


def test_the_list_has_a_line_for_each_checkpoint_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    root = out / "checkpoints"
    (root / step_name(10) / KNOWN_GOOD).touch()
    shipped = {"manifest": manifest_checksum((root / step_name(10) / MANIFEST).read_bytes())}
    (root / step_name(10) / UPLOADED).write_text(json.dumps(shipped))
    (root / step_name(20) / UPLOADED).write_text(json.dumps(shipped))  # of another save
    assert main(["checkpoints", str(out), "pin", "20"]) == 0
    assert main(["checkpoints", str(make_run(tmp_path))]) == 0  # by its run file
    kept, header, newest, older = capsys.readouterr().out.splitlines()
    assert kept == "pinned step_000000020"
    assert cells(header) == cells(
        "step  tokens  age  size  ranks  ZeRO  known-good  pinned  uploaded  verified"
    )
    assert cells(newest)[0] == "20"
    assert cells(newest)[6:] == ["-", "yes", "-", "-"]
    assert cells(older)[6:] == ["yes", "-", "yes", "-"]
    header, _, row = table(root, timedelta(hours=2, minutes=59))
    manifest = parse_manifest((root / step_name(10) / MANIFEST).read_text())
    assert cells(row)[:6] == [
        "10",
        f"{manifest.tokens:,}",
        "2 h",
        format_bytes(manifest.total_bytes),
        str(manifest.world_size),
        str(manifest.zero_stage),
    ]
    assert [header.index(word) for word in ("known-good", "uploaded")] == [
        row.index("yes"),
        row.rindex("yes"),
    ]
    assert main(["checkpoints", str(out), "unpin", "20"]) == 0
    assert main(["checkpoints", str(out), "list"]) == 0
    assert cells(capsys.readouterr().out.splitlines()[2])[7] == "-"


def test_a_folder_of_checkpoints_anywhere_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = (made(tmp_path) / "checkpoints").rename(tmp_path / "vault")
    assert main(["checkpoints", str(elsewhere)]) == 0
    assert [cells(line)[0] for line in capsys.readouterr().out.splitlines()] == ["step", "20", "10"]


def test_spans_and_sizes_are_said_in_the_unit_that_matters() -> None:
    spans = {-3: "0 s", 59.9: "59 s", 60: "1 min", 7_199: "1 h", 86_399: "23 h", 5 * 86_400: "5 d"}
    assert {seconds: format_age(seconds) for seconds in spans} == spans
    sizes = {0: "0 B", 999: "999 B", 1_000: "1.0 kB", 999_600: "1.0 MB", 2.5e12: "2.5 TB", 2e15: "2,000.0 TB"}
    assert {number: format_bytes(number) for number in sizes} == sizes


def test_verify_names_what_is_broken_and_moves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    assert main(["checkpoints", str(out), "verify"]) == 0
    shard = next((out / "checkpoints" / step_name(20)).glob("bf16_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    before = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert main(["checkpoints", str(out), "verify", "10"]) == 0
    capsys.readouterr()
    assert main(["checkpoints", str(out), "verify"]) == 2
    said = capsys.readouterr()
    assert f"step_000000020  {shard.name} has" in said.out
    assert "step_000000010  intact" in said.out
    assert "not every checkpoint is intact" in said.err
    assert main(["checkpoints", str(out), "universal", "20"]) == 2
    assert "only an intact checkpoint is converted" in capsys.readouterr().err
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == before


def test_what_was_verified_is_shown_with_its_time_until_another_save_takes_its_place(tmp_path: Path) -> None:
    root = made(tmp_path) / "checkpoints"
    folder = root / step_name(20)
    assert main(["checkpoints", str(root.parent), "verify", "20"]) == 0
    mark = json.loads((folder / VERIFIED).read_text())
    mark["time"] = (datetime.now(UTC) - timedelta(hours=2, minutes=1)).isoformat()
    (folder / VERIFIED).write_text(json.dumps(mark))
    _, newest, older = format_inventory(root)
    assert (cells(newest)[-1], cells(older)[-1]) == ("2 h ago", "-")

    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text + "\n")
    assert cells(list(format_inventory(root))[1])[-1] == "-"
    (folder / MANIFEST).write_text(text)
    (folder / VERIFIED).write_text("{")
    assert cells(list(format_inventory(root))[1])[-1] == "-"


def test_a_checkpoint_that_is_no_longer_intact_loses_its_mark(tmp_path: Path) -> None:
    root = made(tmp_path) / "checkpoints"
    assert inventory.verify_folder(root / step_name(20)) is None
    shard = next((root / step_name(20)).glob("bf16_*"))
    flipped = bytearray(shard.read_bytes())
    flipped[-1] ^= 1
    shard.write_bytes(flipped)
    assert cells(list(format_inventory(root))[1])[-1].endswith(" s ago")  # sizes alone do not tell
    assert "checksum" in str(inventory.verify_folder(root / step_name(20)))
    assert cells(list(format_inventory(root))[1])[-1] == "-"


def _truncated(folder: Path) -> str:
    shard = next(folder.glob("bf16_*"))
    shard.write_bytes(b"x")
    return f"{shard.name} has 1 bytes, the manifest says"


def _gone(folder: Path) -> str:
    shard = next(folder.glob("bf16_*"))
    shard.unlink()
    return f"{shard.name} is listed and cannot be read (No such file"


def _no_manifest(folder: Path) -> str:
    (folder / MANIFEST).unlink()
    return "it has no manifest"


def _torn_manifest(folder: Path) -> str:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"tokens": ', '"tokens": 1'))
    return "its manifest cannot be read: its manifest does not match its own checksum"


def _other_step(folder: Path) -> str:
    (folder / MANIFEST).write_bytes((folder.with_name(step_name(10)) / MANIFEST).read_bytes())
    return "its manifest is of step 10"


@pytest.mark.parametrize("harm", [_truncated, _gone, _no_manifest, _torn_manifest, _other_step])
def test_a_broken_checkpoint_is_listed_with_the_reason(tmp_path: Path, harm: object) -> None:
    root = made(tmp_path) / "checkpoints"
    assert callable(harm)
    reason = harm(root / step_name(20))
    header, broken, intact = format_inventory(root)
    assert broken.startswith(f"  20  BROKEN: {reason}")
    assert cells(intact)[0] == "10"
    assert cells(header)[0] == "step"


def test_a_disk_that_does_not_answer_is_said_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made(tmp_path) / "checkpoints"

    def fails(*_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(inventory, "find_first_problem", fails)
    assert "  20  it cannot be checked ([Errno 5] Input/output error)" in list(format_inventory(root))


def test_a_manifest_of_another_step_at_the_place_is_broken(tmp_path: Path) -> None:
    root = made(tmp_path) / "checkpoints"
    (root / step_name(20) / MANIFEST).write_bytes((root / step_name(10) / MANIFEST).read_bytes())
    for name in parse_manifest((root / step_name(10) / MANIFEST).read_text()).files:
        (root / step_name(20) / name).write_bytes((root / step_name(10) / name).read_bytes())
    remote = reopen_remote(str(root))
    assert [entry.reason for entry in list_remote_entries(remote)] == ["its manifest is of step 10", None]
    assert find_remote_problem(remote, 20) == "its manifest is of step 10"
    assert find_remote_problem(remote, 10) is None
    remote.write(20, MANIFEST, b"{")
    assert str(find_remote_problem(remote, 20)).startswith("its manifest cannot be read: ")


def shipping(folder: Path, places: str) -> Path:
    """A run file that names where its checkpoints are."""
    run_file = make_run(folder)
    run_file.write_text(run_file.read_text().replace("[checkpoint]\n", f"[checkpoint]\n{places}\n"))
    return run_file


def test_a_run_whose_checkpoints_lie_elsewhere_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = shipping(tmp_path, f'local_dir = "{tmp_path}/nvme"\nupload_to = "{tmp_path}/vault"')
    plan = load_plan(run_file)
    for words in (["list"], ["verify"], ["pin", "10"], ["diff", "10", "20"]):
        assert main(["checkpoints", str(run_file), *words]) == 2
        assert (
            f"{run_file}: there is no {plan.out}/checkpoints here; each host has its own in "
            f"{plan.checkpoints}, and uploaded checkpoints are in {tmp_path}/vault; use --uploaded, or "
            f"name a folder of checkpoints instead of {run_file}"
        ) in capsys.readouterr().err
    assert main(["checkpoints", str(run_file), "diff", "/nowhere", "/no"]) == 2  # needs neither
    assert "/nowhere cannot be opened" in capsys.readouterr().err
    assert main(["checkpoints", str(run_file), "--uploaded"]) == 0
    assert f"{tmp_path}/vault has no checkpoint" in capsys.readouterr().out

    run_file = shipping(tmp_path / "shared", f'upload_to = "{tmp_path}/vault"')
    assert main(["checkpoints", str(run_file)]) == 2
    said = capsys.readouterr().err
    assert f"checkpoints here; and uploaded checkpoints are in {tmp_path}/vault; use --uploaded" in said
    save(load_plan(run_file).checkpoints, 10, World())
    assert main(["checkpoints", str(run_file)]) == 0


def test_shipped_is_refused_where_nothing_is_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = make_run(tmp_path)
    assert main(["checkpoints", str(run_file), "--uploaded"]) == 2
    assert (
        f"{run_file}: checkpoints are not uploaded; --uploaded needs checkpoint.upload_to there"
        in capsys.readouterr().err
    )
    assert main(["checkpoints", str(run_file)]) == 0
    assert "has no checkpoint" in capsys.readouterr().out


def test_what_was_set_aside_has_a_line_of_its_own(tmp_path: Path) -> None:
    root = made(tmp_path) / "checkpoints"
    aside = root / f"{step_name(20)}.broken2"
    (root / step_name(20)).rename(aside)
    then = (datetime.now(UTC) - timedelta(days=5)).timestamp()
    os.utime(aside, (then, then))
    *_, last = format_inventory(root)
    assert last == "step_000000020.broken2: renamed as broken, last touched 5 d ago; no start uses it"


def test_a_step_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)
    assert main(["checkpoints", str(out), "pin", "30"]) == 2
    assert "has no checkpoint of step 30; it has: 20, 10" in capsys.readouterr().err
    assert main(["checkpoints", str(out), "verify", "newest"]) == 2
    assert "'newest' is not a step; give a whole number" in capsys.readouterr().err
    (tmp_path / "new").mkdir()
    assert main(["checkpoints", str(tmp_path / "new")]) == 0
    assert "has no checkpoint" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "new"), "verify"]) == 0
    assert "has no checkpoint" in capsys.readouterr().out


WRONG_WORDS = {
    "pin": "checkpoints pin: 0 checkpoint(s) named, expected 1, like `checkpoints RUN pin 1000`",
    "verify 10 20": "checkpoints verify: 2 checkpoint(s) named, expected 0 or 1",
    "diff 10": "checkpoints diff: 1 checkpoint(s) named, expected 2, like `checkpoints RUN diff 1000 1000`",
    "diff 10 20 --uploaded": "checkpoints diff: --uploaded belongs to list, verify, pin, unpin",
}


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS.items(), ids=WRONG_WORDS)
def test_words_that_do_not_fit_together_are_named(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(tmp_path), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_disk_that_does_not_answer_is_no_broken_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = made(tmp_path)

    def fails(*_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(inventory, "find_damage", fails)
    assert main(["checkpoints", str(out), "verify", "20"]) == 2
    assert "cannot be checked ([Errno 5] Input/output error); fix the storage" in capsys.readouterr().err
