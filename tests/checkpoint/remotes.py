"""For tests of shipping: an S3 API of its own on this host, and a way there that breaks."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
BUCKET = "vault"


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, int]]:
    """Host and port of a fresh S3 API with one bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        request = urllib.request.Request(f"http://{host}:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield host, port
    finally:
        server.stop()


def use_s3(monkeypatch: pytest.MonkeyPatch, host: str, port: int, folder: Path) -> None:
    """Say in the environment, as a user would, which S3 API is meant and who asks."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(folder / "none"))  # not the files of whoever runs the tests


class BreakingWay:
    """A TCP proxy in front of a server, which closes a connection once so many bytes went up through it."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.breaks_after: int | None = None  # bytes of one connection; None: healed
        self.num_breaks = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            for way in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                carried += len(data)
                if up and self.breaks_after is not None and carried > self.breaks_after:
                    self.num_breaks += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
