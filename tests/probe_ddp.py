"""Run by torchrun in test_ddp.py: 07, writing down what each process fetches, trains and tests.

torchrun ... probe_ddp.py OUTPUT KIND [flags of 07]    writes OUTPUT/RANK.pt

KIND: plain, in float64; dropout, with a model that has it; killed: so too, but kill -9 ends rank 1
in the second epoch and, once that run has resumed, rank 0 in the write of the third checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from conftest import ROOT, load
from torch import nn
from torchvision.datasets import mnist

output, kind = Path(sys.argv.pop(1)), sys.argv.pop(1)
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
script = load("07_ddp.py")
record = {"fetched": [], "train": [], "test": [], "gradients": [], "masks": []}
build_model, load_data, torch_save = script.build_model, script.load_data, torch.save


class Recorded(script.InMemory):
    def __getitems__(self, indices):
        record[self.name].append(list(indices))
        return super().__getitems__(indices)


def load_recorded(args):
    loaders = load_data(args)
    for loader, name in zip(loaders, ("train", "test")):
        loader.dataset.__class__, loader.dataset.name = Recorded, name
        if kind == "plain":
            images, targets = loader.dataset.tensors
            loader.dataset.tensors = images.double(), targets
    return loaders


class Adam(torch.optim.Adam):
    def step(self, closure=None):
        grads = [parameter.grad.flatten() for parameter in self.param_groups[0]["params"]]
        record["gradients"].append(torch.cat(grads))
        super().step(closure)


def look(dropout, inputs, outputs):
    if dropout.training:
        record["masks"].append(outputs.flatten()[:784] == 0)
        if kind == "killed" and (rank, restarts, len(record["masks"])) == ("1", "0", 24):
            os.kill(os.getpid(), signal.SIGKILL)


def build(width):
    if kind == "plain":
        return build_model(width).double()
    dropout = nn.Dropout(0.2)
    dropout.register_forward_hook(look)
    return nn.Sequential(dropout, *build_model(width))


def save(state, path, **options):
    torch_save(state, path, **options)
    if kind == "killed" and restarts == "1" and isinstance(state, dict) and state.get("epoch") == 3:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def fetch(url, download_root, filename, md5):
    record["fetched"].append(filename)
    name = filename[: -len(".gz")]
    os.symlink(ROOT / "data" / "MNIST" / "raw" / name, Path(download_root, name))


script.build_model, script.load_data, torch.save = build, load_recorded, save
torch.optim.Adam, mnist.download_and_extract_archive = Adam, fetch
script.main()
torch_save(record, output / f"{rank}.pt")
