"""What training programs of several tests have in common, and where they run."""

from __future__ import annotations

import contextlib
import subprocess

import psutil

LINEAR = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from hpcstage.torch import Checkpointer, Elastic, ElasticSampler

torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(60, 6, dtype=torch.float64)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(6, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = ElasticSampler(data, 2, seed=3)
"""
"""A model, what trains it, and 60 samples, for `hpcstage.torch.Elastic`."""


def node(run: subprocess.Popen[bytes], index: int) -> list[psutil.Process]:
    """The processes of a virtual node: what starts its agent, the agent, its processes."""
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "hpcstage.lead.trainer" in words and words[-1] == str(index):
                return [process, *process.children(recursive=True)]
    raise AssertionError(f"no node {index}")
