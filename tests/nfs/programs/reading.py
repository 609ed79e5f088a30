"""Reads all files of a dataset some times in a shuffled order, and prints a digest of each epoch."""

import hashlib
import os
import random
import sys
import time

data, epochs, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
paths = sorted(os.path.join(top, name) for top, _, names in os.walk(data) for name in names)
for epoch in range(epochs):
    random.Random(epoch).shuffle(paths)
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read())
        time.sleep(pause_s)
    print(epoch, digest.hexdigest(), flush=True)
