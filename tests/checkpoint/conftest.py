"""StorageLayout that checkpoints are uploaded to: a folder, and an S3 API of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.remotes import BUCKET, s3_server, use_s3


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["folder", "s3"])
def place(
    request: pytest.FixtureRequest, server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    use_s3(monkeypatch, *server, tmp_path)
    return str(tmp_path / "vault") if request.param == "folder" else f"s3://{BUCKET}/{tmp_path.name}"
