"""A group of real exchanges between nodes that the test plays."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from pathlib import Path

import psutil
from conftest import below

from benchmarks.peernodes import Node, launch, manifest_of, serve


class Group:
    """Nodes and their exchanges."""

    def __init__(self, directory: Path, count: int, sizes, *, handed=False, links=(), places=None) -> None:
        self.directory = directory
        self.manifest = manifest_of(sizes, links=links)
        self.nodes = [
            Node(
                (places or {}).get(index, directory) / f"v{index}",
                index,
                count,
                None if handed and index else self.manifest,
            )
            for index in range(count)
        ]
        self.log = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, nodes=None, **options) -> Group:
        self.process = launch(nodes or self.nodes, self.directory, log=self.log, **options)
        return self

    def ready(self) -> Group:
        serve(self.nodes, lambda: all(node.is_ready for node in self.nodes))
        return self

    def stage(self, id_: int, node: int) -> bytes:
        data = random.Random(id_).randbytes(self.manifest.size(id_))
        self.nodes[node].stage(id_, data)
        return data

    def exchanges(self) -> list[psutil.Process]:
        return [child for child, words in below(self.process.pid) if words[1:3] == ["-m", "hpcstage.exchange"]]

    def kill_exchanges(self) -> None:
        """Kills all of them; those that are left may end as the first one goes."""
        for exchange in self.exchanges():
            with contextlib.suppress(psutil.NoSuchProcess):
                exchange.kill()

    def end(self) -> int:
        for node in self.nodes:
            node.end()
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(300)
        finally:
            if self.process.poll() is None:
                self.process.kill()

    def text(self) -> str:
        return self.log.read_text()

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
