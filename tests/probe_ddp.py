"""Run by torchrun in test_ddp.py: 07 in float64, writing down what each process trains and tests.

torchrun ... probe_ddp.py OUTPUT [flags of 07]    writes OUTPUT/RANK.pt
"""

import os
import sys
from pathlib import Path

import torch
from conftest import load

output = Path(sys.argv.pop(1))
script = load("07_ddp.py")
seen, gradients = [], []
build_model, load_data = script.build_model, script.load_data


class Recorded(script.InMemory):
    def __getitems__(self, indices):
        seen.append((len(self), list(indices)))
        return super().__getitems__(indices)


def load_double(*args, **kwargs):
    inputs, targets = load_data(*args, **kwargs).tensors
    return Recorded(inputs.double(), targets)


class Adam(torch.optim.Adam):
    def step(self, closure=None):
        grads = [parameter.grad.flatten() for parameter in self.param_groups[0]["params"]]
        gradients.append(torch.cat(grads))
        super().step(closure)


script.build_model = lambda width: build_model(width).double()
script.load_data = load_double
torch.optim.Adam = Adam
script.main()
torch.save({"seen": seen, "gradients": gradients}, output / f"{os.environ['RANK']}.pt")
