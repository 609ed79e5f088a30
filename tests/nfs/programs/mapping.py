"""Stores results through a memory map as programs do: one sample after the other, or all after a long computation."""

import sys
import time

import numpy as np

out, how = sys.argv[1:]
SAMPLES = 600
results = np.lib.format.open_memmap(f"{out}/predictions.npy", mode="w+", dtype=np.float64, shape=(SAMPLES, 64))
scores = np.memmap(f"{out}/scores.bin", mode="w+", dtype=np.int64, shape=(SAMPLES,))
if how == "late":
    results[:], scores[:] = -1, -1
    time.sleep(4)
for sample in range(SAMPLES):
    results[sample] = sample + 1
    scores[sample] = sample + 1
    if how == "each":
        time.sleep(0.01)
if how == "late":
    print("stored", flush=True)
