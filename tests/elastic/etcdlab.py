"""Owns an etcd on this machine, what stands between it and those who ask it, and certificates."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from conftest import wait_for

from hpcstage.elastic.membership.etcd import Etcd
from hpcstage.errors import HpcstageError


class SiteEtcd:
    """An etcd on this machine, of one server or of several, by https where it has a certificate and its key."""

    def __init__(self, directory: Path, count: int = 1, certificate: tuple[Path, Path] | None = None) -> None:
        self.directory = directory
        scheme = "https" if certificate else "http"
        urls = [f"://127.0.0.1:{port}" for port in _free_ports(2 * count)]
        self.endpoints = [scheme + url for url in urls[:count]]
        self.endpoint = ";".join(self.endpoints)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._peers = ["http" + url for url in urls[count:]]
        files = [] if certificate is None else ["--cert-file", certificate[0], "--key-file", certificate[1]]
        self._secret = [os.fspath(word) for word in files]
        try:
            self.start()
        except BaseException:
            self.kill()
            raise

    def start(self) -> None:
        """Starts the servers that do not run."""
        for server in range(len(self.endpoints)):
            if server not in self.processes:
                with self.directory.with_suffix(".log").open("ab") as log:
                    self.processes[server] = subprocess.Popen(
                        self._words(server), stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
        wait_for(lambda: all(map(self.answers, self.endpoints)), 30, "an etcd that answers")

    def _words(self, server: int) -> list[str]:
        own, peer = self.endpoints[server], self._peers[server]
        return [
            "etcd", "--name", f"s{server}", "--data-dir", f"{self.directory}-{server}", *self._secret,
            "--listen-client-urls", own, "--advertise-client-urls", own,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", ",".join(f"s{number}={url}" for number, url in enumerate(self._peers)),
        ]  # fmt: skip

    def client(self, limit_s: float = 20.0) -> Etcd:
        return Etcd(self.endpoints, limit_s)

    def answers(self, *endpoints: str) -> bool:
        """Whether one of these endpoints answers, or one of all."""
        try:
            Etcd(endpoints or self.endpoints, 1.0).get("there")
        except HpcstageError:
            return False
        return True

    def ask(self, server: int, method: str, **what: str) -> Any:
        """Asks a server for what hpcstage never does."""
        with urlopen(f"{self.endpoints[server]}/v3/{method}", json.dumps(what).encode(), 10) as answer:
            return json.load(answer)

    def leader(self) -> int:
        """The server that leads those that run."""
        said = {server: self.ask(server, "maintenance/status") for server in self.processes}
        return next(server for server, one in said.items() if one["leader"] == one["header"]["member_id"])

    def kill(self, *servers: int) -> None:
        """Kills these servers, or all."""
        for server in servers or [*self.processes]:
            process = self.processes.pop(server)
            process.kill()
            process.wait()


class Forgetful:
    """Stands in front of an etcd, and passes everything on but the answers to some requests, whose connections it
    closes."""

    def __init__(self, etcd: SiteEtcd) -> None:
        self.forgets: list[str] = []
        """Words, each in a request whose answer is still to be forgotten."""
        self.meanwhile: Callable[[], object] = int
        """What happens then, before it is asked again."""
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.closing(HTTPConnection(urlsplit(etcd.endpoint).netloc, timeout=10)) as asked:
                    asked.request("POST", self.path, body)
                    answer = asked.getresponse()
                    said = answer.read()
                request = f"{self.path} {body.decode()}"
                forgotten = next((word for word in between.forgets if word in request), None)
                if forgotten is not None:
                    between.forgets.remove(forgotten)
                    between.meanwhile()
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Forgetful:
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def certified(directory: Path) -> tuple[Path, tuple[Path, Path]]:
    """Makes the certificate of a site, and one for this machine, with its key, that the site has signed."""
    directory.mkdir()
    kind = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    site, machine = ["-keyout", "site.key", "-out", "site.pem"], ["-keyout", "key.pem", "-out", "cert.pem"]
    signed = ["-CA", "site.pem", "-CAkey", "site.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    for words in ([*site, "-subj", "/CN=site"], [*machine, "-subj", "/CN=etcd", *signed]):
        subprocess.run([*kind, *words], cwd=directory, check=True, capture_output=True)
    return directory / "site.pem", (directory / "cert.pem", directory / "key.pem")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in taken]
