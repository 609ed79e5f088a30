"""Programs as others write them: each reads the recordings below a directory once and prints a result.

    python strangers.py spectra DIR      np.load of each recording, mean power spectrum
    python strangers.py checksums DIR    sha256 of each recording, read by a pool of threads
    python strangers.py patches DIR      patches of each recording in random order, the brightest of all
    python strangers.py archive DIR      all recordings into a compressed tar that goes nowhere

They know nothing of hpcstage, and nothing of the benchmark.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

PATCH = 64 * 1024


def recordings(top: str) -> Iterator[str]:
    for folder, _, names in os.walk(top):
        for name in sorted(names):
            yield os.path.join(folder, name)


def spectra(top: str) -> str:
    import numpy as np

    power, count = np.zeros(2049), 0
    for recording in recordings(top):
        signal = np.load(recording)
        frames = signal[: len(signal) // 4096 * 4096].reshape(-1, 4096).astype(np.float32)
        power += (np.abs(np.fft.rfft(frames, axis=1)) ** 2).sum(axis=0)
        count += len(frames)
    return f"{power.sum() / count:.6g}"


def checksum(recording: str) -> tuple[str, str]:
    return recording, hashlib.sha256(Path(recording).read_bytes()).hexdigest()


def checksums(top: str) -> str:
    sums = {}
    with ThreadPoolExecutor(max_workers=6) as pool:
        for future in as_completed([pool.submit(checksum, recording) for recording in recordings(top)]):
            recording, found = future.result()
            sums[recording] = found
    return hashlib.sha256("".join(sums[name] for name in sorted(sums)).encode()).hexdigest()


def patches(top: str) -> str:
    dice, brightest = random.Random(1), 0
    for recording in recordings(top):
        with open(recording, "rb") as file:
            starts = list(range(0, file.seek(0, os.SEEK_END), PATCH))
            dice.shuffle(starts)
            for start in starts:
                file.seek(start)
                brightest = max(brightest, sum(file.read(PATCH)[::16]))
    return str(brightest)


def archive(top: str) -> str:
    with open(os.devnull, "wb") as nowhere, tarfile.open(fileobj=nowhere, mode="w|gz") as tar:
        tar.add(top, arcname="recordings")
    return "done"


TOOLS = {"spectra": spectra, "checksums": checksums, "patches": patches, "archive": archive}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("tool", choices=sorted(TOOLS))
    parser.add_argument("directory")
    options = parser.parse_args()
    print(TOOLS[options.tool](options.directory))
