"""What training programs of several tests have in common."""

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
