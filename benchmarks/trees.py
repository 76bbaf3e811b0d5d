"""Two commits of this repository side by side, each with its own package, and commands run in either."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

_STOP_SECONDS = 60.0  # a run that is stopped saves first
_LINES_SHOWN = 30  # of the output of a command that failed


@dataclass(frozen=True)
class Tree:
    """A work tree in a temporary folder."""

    name: str  # "base" or "now"
    folder: Path

    def run(self, words: Sequence[str], code: int = 0) -> str:
        """Run this Python on `words` in the tree, with the tree's package; what it printed to stdout.

        Raises:
            SystemExit: it ended with another code than `code`; its last lines are printed.
        """
        errors = self.folder.with_name(f"{self.name}.stderr")
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=os.environ | {"PYTHONPATH": str(self.folder), "DS_ACCELERATOR": "cpu"},
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                errors="replace",
            )
            try:
                printed, _ = process.communicate()
            except BaseException:
                _stop(process)
                raise
        if process.returncode != code:
            lines = [*printed.splitlines(), *errors.read_text(errors="replace").splitlines()]
            print(*lines[-_LINES_SHOWN:], sep="\n")
            sys.exit(f"{self.name}: {' '.join(words)}: exit code {process.returncode}, expected {code}")
        return printed

    def command(self, *words: str, code: int = 0) -> str:
        """Run the tree's own `ds-pretrain`."""
        return self.run(["-m", "ds_pretrain", *words], code)

    def require_own_package(self) -> None:
        """End the benchmark if commands in this tree would use another tree's package."""
        found = Path(self.run(["-c", "import ds_pretrain; print(ds_pretrain.__file__)"]).strip()).resolve()
        expected = (self.folder / "ds_pretrain/__init__.py").resolve()
        if found != expected:
            sys.exit(f"{self.name} would run {found}; expected {expected}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def checked_out(root: Path, folder: Path, commit: str, name: str) -> Iterator[Tree]:
    """A git work tree of `commit` at folder/name; it is gone afterwards, also after an error or a signal."""
    tree = Tree(name, folder / name)
    try:
        _git(root, "worktree", "add", "--quiet", "--detach", str(tree.folder), commit)
        yield tree
    finally:
        _git(root, "worktree", "remove", "--force", "--force", str(tree.folder), check=False)
        shutil.rmtree(tree.folder, ignore_errors=True)


def commit_of(root: Path, name: str) -> str | None:
    """The commit that a name means; None if it means none."""
    done = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", check=False)
    return done.stdout.strip() or None


def changed_files(root: Path) -> list[str]:
    """Files of the work tree that are not as in HEAD: changed, new (unless git ignores them) or deleted."""
    changed = _git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD").stdout.split("\0")
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z").stdout.split("\0")
    return [name for name in changed if name] + [name for name in new if name and (root / name).is_file()]


def copy_changes(root: Path, names: Sequence[str], tree: Tree) -> None:
    """Bring a work tree of HEAD to the state of the one at `root`."""
    for name in names:
        target = tree.folder / name
        if (root / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        else:
            target.unlink(missing_ok=True)


def end_on_sigterm() -> None:
    """Make SIGTERM an ordinary exit, so that what is temporary is removed."""

    def leave(number: int, _: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _git(root: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done
