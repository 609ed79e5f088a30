"""A training program as a user has it: PyTorch, files read with plain `open`, nothing of hpcstage.

Owns: one real training loop with three small networks, deterministic to the bit for a seed. With --compute-only the
files are read before the clock starts, so that the computing is measured alone. With --step each step of the training
takes at least so long: the gradients are computed here, the time is that of an accelerator, which does not change with
what else the processors do.

    python train.py --data DIR --list NAMES --epochs 2 --workers 2 --net cnn --weights OUT
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

_STARTED_S = time.monotonic()

import os  # noqa: E402  the clock starts before the imports, which are a part of what a user waits for
import select  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

CLASSES = 10
SIDE = 64
CHANNELS = 3
PIXELS = CHANNELS * SIDE * SIDE
NETS = ("cnn", "alexnet", "resnet")
LONGEST_TURN_S = 120.0

Sample = tuple[torch.Tensor, int]


class Files(Dataset[Sample]):
    """One file, one sample; `held` are contents that were read before."""

    def __init__(self, paths: list[str], held: dict[str, bytes] | None = None) -> None:
        self.paths = paths
        self.held = held

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample:
        path = self.paths[index]
        if self.held is not None:
            return decode(self.held[path])
        with open(path, "rb") as file:
            return decode(file.read())


def decode(data: bytes) -> Sample:
    """An image and its class, of all bytes of the file."""
    raw = np.frombuffer(data, dtype=np.uint8)
    label = int(raw[-1]) % CLASSES
    pieces = raw[: len(raw) // PIXELS * PIXELS].reshape(-1, CHANNELS, SIDE, SIDE)
    image = pieces.mean(axis=0, dtype=np.float32) / np.float32(128) - np.float32(1)
    return torch.from_numpy(image), label


class Residual(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the input's shape."""
        inner = self.second(functional.relu(self.first(x)))
        return functional.relu(x + inner)


def _block(inputs: int, outputs: int, kernel: int, pool: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(pool)]


def make_net(name: str) -> nn.Sequential:
    """A network with three convolutions, one in the manner of AlexNet, one with residual blocks."""
    if name == "cnn":
        body = [*_block(3, 16, 3, 2), *_block(16, 32, 3, 2), *_block(32, 48, 3, 2)]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(48 * 64, CLASSES))
    if name == "alexnet":
        body = [*_block(3, 16, 5, 2), *_block(16, 24, 5, 2), nn.Conv2d(24, 32, 3, padding=1), nn.ReLU()]
        head = [nn.Flatten(), nn.Linear(32 * 64, 192), nn.ReLU(), nn.Linear(192, CLASSES)]
        return nn.Sequential(*body, *_block(32, 32, 3, 2), *head)
    body = [*_block(3, 20, 3, 2), Residual(20), nn.MaxPool2d(2), Residual(20), nn.MaxPool2d(2), Residual(20)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(20 * 64, CLASSES))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a small network on files.")
    parser.add_argument("--data", required=True, help="directory of the files")
    parser.add_argument("--list", help="file with one name per line below DATA, in reading order (default: sorted)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--net", choices=NETS, default="cnn")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--step", type=float, default=0.0, metavar="SECONDS", help="least time of a step, as on an accelerator"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument(
        "--no-prefetch", action="store_true", help="plain loop: read a batch, train on it, read the next"
    )
    parser.add_argument("--compute-only", action="store_true", help="read all files before the clock starts")
    parser.add_argument(
        "--turns", nargs=2, metavar=("MINE", "OTHERS"), help="FIFOs: an epoch waits for a byte, then leaves one"
    )
    parser.add_argument("--weights", help="file for the final weights")
    parser.add_argument("--timings", help="file for the times, JSON")
    return parser.parse_args()


def names(options: argparse.Namespace) -> list[str]:
    """The files in reading order."""
    if not options.list:
        return sorted(e.name for e in os.scandir(options.data) if e.is_file())
    with open(options.list, encoding="utf-8") as file:
        return file.read().split("\n")[:-1]


class Turns:
    """Epochs of two programs, one after the other, so that both meet the machine in the same moods."""

    def __init__(self, paths: list[str] | None) -> None:
        self.ends = [os.open(path, os.O_RDWR) for path in paths or ()]

    def wait(self) -> None:
        """Until it is this program's turn."""
        if self.ends:
            if not select.select(self.ends[:1], [], [], LONGEST_TURN_S)[0]:
                raise SystemExit("the other program does not end its epoch")
            os.read(self.ends[0], 1)

    def give(self) -> None:
        """It is the other's."""
        if self.ends:
            os.write(self.ends[1], b".")


class Clock:
    """Monotonic times of what happens, comparable with those of other processes on the machine."""

    def __init__(self) -> None:
        self.times: dict[str, object] = {"start_s": _STARTED_S, "imported_s": time.monotonic(), "preload_s": 0.0}
        self.epochs: list[tuple[float, float]] = []
        self.steps = 0
        self.late_steps = 0

    def mark(self, name: str) -> None:
        """The first time that this happens."""
        self.times.setdefault(name, time.monotonic())

    def step(self) -> float:
        """A batch is there."""
        self.mark("first_batch_s")
        self.steps += 1
        return time.monotonic()

    def wait(self, until_s: float) -> None:
        """Until the accelerator would be done; a processor that took longer is counted."""
        left_s = until_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        else:
            self.late_steps += 1

    def save(self, path: str | None) -> None:
        """Writes the times, if anyone asked for them."""
        self.mark("end_s")
        if path:
            counts = {"steps": self.steps, "late_steps": self.late_steps}
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**self.times, **counts, "epochs_s": self.epochs}, file)


def batches(data: Files, options: argparse.Namespace) -> DataLoader[Sample]:
    """PyTorch's loader; without workers it reads when the loop asks."""
    workers = 0 if options.no_prefetch else options.workers
    context = options.start_method if workers else None
    return DataLoader(
        data,
        batch_size=options.batch,
        num_workers=workers,
        multiprocessing_context=context,
    )


def train(net: nn.Sequential, loader: DataLoader[Sample], options: argparse.Namespace, clock: Clock) -> None:
    """The loop. Prints the last loss of each epoch with all its bits."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    turns = Turns(options.turns)
    for epoch in range(options.epochs):
        turns.wait()
        started_s = time.monotonic()
        loss = torch.zeros(())
        for images, labels in loader:
            step = clock.step()
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), labels)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            clock.wait(step + options.step)
        clock.epochs.append((started_s, time.monotonic()))
        turns.give()
        value = float(loss.item())
        print(f"epoch {epoch} loss {value:.6f} {value.hex()}", flush=True)


def digest(net: nn.Sequential) -> str:
    """A fingerprint of all weights."""
    hashed = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    """Reads, trains, writes the weights."""
    options = arguments()
    clock = Clock()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    paths = [os.path.join(options.data, name) for name in names(options)]
    held: dict[str, bytes] | None = None
    if options.compute_only:
        before_s = time.monotonic()
        held = {}
        for path in paths:
            with open(path, "rb") as file:
                held[path] = file.read()
        clock.times["preload_s"] = time.monotonic() - before_s
    net = make_net(options.net)
    train(net, batches(Files(paths, held), options), options, clock)
    if options.weights:
        torch.save(net.state_dict(), options.weights)
    print(f"weights {digest(net)}", flush=True)
    clock.save(options.timings)


if __name__ == "__main__":
    main()
