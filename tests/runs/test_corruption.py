"""Every file of a real checkpoint damaged in every way: named, set aside, and the one before it is used."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ds_pretrain.checkpoint import restore as restore_module
from ds_pretrain.checkpoint.manifest import MANIFEST, FileEntry, parse_manifest
from ds_pretrain.checkpoint.storage import StorageLayout
from ds_pretrain.core.distributed import World, barrier
from ds_pretrain.core.errors import EXIT_BAD_INPUT, RunError
from tests.harness import record_run, start
from tests.ranks import heard, run_ranks
from tests.runs.results import trace
from tests.scenario import make_run
from tests.tiers import slow, slow_but

NEWEST, BEFORE = "step_000000004", "step_000000003"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_elsewhere(path: Path) -> None:
    """To a file of the same size outside of the checkpoint."""
    outside = path.parents[len(path.parents) - 1 - path.parts.index(NEWEST)].parent / "outside"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    outside.write_bytes(bytes(data))
    path.unlink()
    path.symlink_to(outside)


def _link_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def _swap(path: Path) -> None:
    """With the other rank's file of the same kind."""
    other = path.with_name(_other_ranks(path.name) or "")
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _other_ranks(name: str) -> str | None:
    for own, other in (("rank_0_mp", "rank_1_mp"), ("rank_00000", "rank_00001")):
        if own in name:
            return name.replace(own, other)
    return None


def _differs_from_the_other_ranks(path: Path) -> bool:
    other = _other_ranks(path.name)
    if other is None:
        return False  # the first rank's file tells
    return path.with_name(other).read_bytes() != path.read_bytes()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (_truncate, " bytes, the manifest says "),
    "flipped": (_flip, "the checksum of "),
    "emptied": (_empty, " has 0 bytes, the manifest says "),
    "deleted": (Path.unlink, " is listed and cannot be read (No such file or directory)"),
    "a folder": (_make_a_folder, " bytes, the manifest says "),
    "a link elsewhere": (_link_elsewhere, "the checksum of "),
    "a link nowhere": (_link_nowhere, " is listed and cannot be read (No such file or directory)"),
    "swapped": (_swap, ""),  # by size or by checksum
}
MANIFEST_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (lambda path: path.write_bytes(b"\x80\x02garbage"), "its manifest cannot be read"),
    "no JSON": (lambda path: path.write_text("{"), "its manifest cannot be read"),
    "emptied": (_empty, "its manifest cannot be read"),
    "truncated": (_truncate, "its manifest cannot be read"),
    "flipped": (_flip, "its manifest"),
    "deleted": (Path.unlink, "it has no manifest"),
    "a folder": (_make_a_folder, "it has no manifest"),
    "of another step": (
        lambda path: shutil.copyfile(path.parents[1] / BEFORE / path.name, path),
        "its manifest is of step 3",
    ),
}
LATEST: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(b"\xff\x00"),
    "empty": _empty,
    "a folder": _make_a_folder,
    "gone": Path.unlink,
    "a broken link": _link_nowhere,
    "another checkpoint": lambda path: path.write_text(f"{BEFORE}\n"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """A run of 2 ranks under ZeRO-3 to its end, with the checkpoints of its last two steps."""
    run_file = make_run(
        tmp_path_factory.mktemp("trained"), steps=6, batch_tokens=32, micro_batch_size=1, save_every="1 steps"
    )
    results = run_ranks(record_run, 2, str(run_file), ("checkpoint.keep_last=4",))
    root = run_file.parent / "out" / "checkpoints"
    for step in (5, 6):
        shutil.rmtree(root / f"step_{step:09d}")
    return results, run_file


@dataclass(frozen=True)
class Case:
    """What was found after a damage, what was told, what was raised, and what lies in the folder."""

    found: str | None
    told: list[str]
    raised: str | None
    names: list[str]


def _find(root: Path, world: World) -> tuple[str | None, list[str], str | None]:
    with heard() as told:
        try:
            found = restore_module.find_latest(StorageLayout(root, root), world)
        except RunError as error:
            return None, told, str(error)
    return found.folder.name if found else None, told, None


def _damage_each(world: World, pristine: str, scratch: str, cases: list[tuple[str, str]]) -> list[Case]:
    """Each file damaged in a fresh copy of the checkpoints, which both ranks then search."""
    root, outcomes = Path(scratch) / "checkpoints", []
    for name, kind in cases:
        if world.is_main:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(pristine, root)
            if name == "latest":
                LATEST[kind](root / name)
            elif name == "manifest.json":
                MANIFEST_DAMAGE[kind][0](root / NEWEST / name)
            else:
                DAMAGE[kind][0](root / NEWEST / name)
        barrier(world)
        found = _find(root, world)
        barrier(world)
        outcomes.append(Case(*found, sorted(path.name for path in root.iterdir())))
        barrier(world)
    return outcomes


def _files(root: Path) -> list[str]:
    folder = root / NEWEST
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("every_kind", [False, slow(True)], ids=["one kind a file", "every kind"])
def test_p19_every_file_damaged_in_every_way_is_named_and_set_aside_on_all_ranks_alike(
    trained: tuple[list[Any], Path], tmp_path: Path, every_kind: bool
) -> None:
    root = trained[1].parent / "out" / "checkpoints"
    files = [name for name in _files(root) if name != "manifest.json"]
    assert {"rng/rank_00001.pt", OPTIM.format(1), "run_state.json"} <= {
        name.removeprefix("bf16_") for name in files
    }
    kinds = [kind for kind in DAMAGE if kind != "swapped"]
    cases = [(name, kind) for name in files for kind in kinds]
    if not every_kind:
        assert len(files) >= len(kinds)
        cases = [(name, kinds[place % len(kinds)]) for place, name in enumerate(files)]
    swapped = [(name, "swapped") for name in files if _differs_from_the_other_ranks(root / NEWEST / name)]
    assert len(swapped) == 2  # under ZeRO-3 in fp32 the ranks' model states are the same bytes
    cases += swapped
    cases += [("manifest.json", kind) for kind in MANIFEST_DAMAGE]
    first, second = run_ranks(_damage_each, 2, str(root), str(tmp_path), cases)
    for (name, kind), mine, other in zip(cases, first, second, strict=True):
        assert (mine.found, mine.raised) == (BEFORE, None), (name, kind)
        assert (other.found, other.raised) == (BEFORE, None), (name, kind)
        assert f"{NEWEST}.broken" in mine.names
        assert NEWEST not in mine.names
        [message] = mine.told
        assert message.startswith(f"checkpoint {tmp_path / 'checkpoints' / NEWEST} is broken: "), message
        assert message.endswith(f"; renamed to {NEWEST}.broken, trying the one before it")
        reason = (MANIFEST_DAMAGE if name == "manifest.json" else DAMAGE)[kind][1]
        assert reason in message, (name, kind, message)
        known_as = {name, _other_ranks(name)} if kind == "swapped" else {name}
        named = {Path(n).name for n in known_as if n is not None}
        assert name == "manifest.json" or any(n in message for n in named), (name, kind, message)


def test_p19_latest_whatever_it_holds_stops_no_restore(
    trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    root = trained[1].parent / "out" / "checkpoints"
    cases = [("latest", kind) for kind in LATEST]
    for outcomes in run_ranks(_damage_each, 2, str(root), str(tmp_path), cases):
        assert [(case.found, case.told, case.raised) for case in outcomes] == [(NEWEST, [], None)] * len(
            LATEST
        )


def test_a_file_that_the_manifest_does_not_list_does_not_matter(
    trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(trained[1].parent / "out" / "checkpoints", root)
    (root / NEWEST / "note.txt").write_text("mine")
    (root / NEWEST / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text("of another run")
    (root / "note.txt").write_text("mine")
    (root / "step_12").mkdir()
    (root / "step_000000099.copy").mkdir()
    assert _find(root, World()) == (NEWEST, [], None)


def test_a_file_with_the_name_of_a_checkpoint_is_set_aside(
    trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(trained[1].parent / "out" / "checkpoints", root)
    (root / "step_000000009").write_text("")
    found, told, raised = _find(root, World())
    assert (found, raised) == (NEWEST, None)
    assert "step_000000009 is broken: it has no manifest; renamed to step_000000009.broken" in told[0]


TO_THE_END = [
    (OPTIM.format(1), "flipped"),
    ("rng/rank_00000.pt", "deleted"),
    (OPTIM.format(0), "swapped"),
    ("manifest.json", "of another step"),
    ("latest", "empty"),
]


@pytest.mark.parametrize(
    ("name", "kind"), slow_but(TO_THE_END, TO_THE_END[0]), ids=[f"{name} {kind}" for name, kind in TO_THE_END]
)
def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_bits(
    trained: tuple[list[Any], Path], tmp_path: Path, name: str, kind: str
) -> None:
    straight, run_file = trained
    out = tmp_path / "out"
    shutil.copytree(run_file.parent / "out", out)
    [path] = (
        (out / "checkpoints" / NEWEST).glob(f"**/*{Path(name).name}")
        if name != "latest"
        else [out / "checkpoints" / name]
    )
    kinds: Any = {"latest": LATEST, "manifest.json": {k: v[0] for k, v in MANIFEST_DAMAGE.items()}}
    kinds.get(name, {k: v[0] for k, v in DAMAGE.items()})[kind](path)
    finished = run_ranks(record_run, 2, str(run_file), (f"out={out}", "checkpoint.keep_last=4"))
    assert [ended.digest for ended in finished] == [ended.digest for ended in straight]
    assert trace(out) == trace(run_file.parent / "out")
    first = 5 if name == "latest" else 4
    assert min(finished[0].rates) == first  # the first step after the checkpoint that was used


def test_when_every_checkpoint_is_broken_nothing_starts_and_every_reason_is_said(
    trained: tuple[list[Any], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained[1].parent / "out", out)
    folders = sorted((out / "checkpoints").glob("step_*"))
    for folder in folders:
        _flip(folder / "run_state.json")
    ranks = run_ranks(start, 2, str(trained[1]), (f"out={out}",))
    assert [ended.code for ended in ranks] == [EXIT_BAD_INPUT] * 2
    for folder in folders:
        assert f"checkpoint {folder} is broken: the checksum of run_state.json" in ranks[0].stderr
    assert f"no checkpoint in {out / 'checkpoints'} verifies" in ranks[0].stderr
    assert "put an intact checkpoint back, or give the run file a new `out`" in ranks[0].stderr
    assert "Traceback" not in ranks[0].stderr + ranks[1].stderr
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == [
        f"{folder.name}.broken" for folder in folders
    ]


def test_a_file_that_may_not_be_read_says_nothing_about_the_checkpoint(
    trained: tuple[list[Any], Path],
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        root = Path(folder) / "checkpoints"
        shutil.copytree(trained[1].parent / "out" / "checkpoints", root)
        Path(folder).chmod(0o755)
        (root / NEWEST / "run_state.json").chmod(0)
        with _somebody_else():
            found, told, raised = _find(root, World())
        assert (found, told) == (None, [])
        assert "Permission denied" in str(raised)
        assert "it is not changed" in str(raised)
        assert (root / NEWEST).is_dir()


@pytest.mark.parametrize("text", ["[]", '{"version": 99}', "{", "null"])
def test_a_state_of_another_version_is_left_as_it_is_and_says_what_to_do(
    trained: tuple[list[Any], Path], tmp_path: Path, text: str
) -> None:
    """Not a broken one: its manifest lists these very bytes."""
    root = tmp_path / "checkpoints"
    shutil.copytree(trained[1].parent / "out" / "checkpoints", root)
    (root / NEWEST / "run_state.json").write_text(text)
    manifest = parse_manifest((root / NEWEST / MANIFEST).read_text())
    entry = FileEntry(len(text), hashlib.sha256(text.encode()).hexdigest())
    sealed = replace(manifest, files={**manifest.files, "run_state.json": entry})
    (root / NEWEST / MANIFEST).write_text(sealed.to_json())
    found, _, raised = _find(root, World())
    assert found is None
    assert "match the manifest but cannot be read" in str(raised)
    assert "use the version of ds_pretrain that wrote them, or move the folder away" in str(raised)
    assert (root / NEWEST).is_dir()


@contextmanager
def _somebody_else() -> Iterator[None]:
    """Root reads every file: be a user that does not."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
