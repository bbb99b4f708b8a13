"""07 that writes down in FOLDER/rankN.pt what each process fetches, trains, tests and saves.

torchrun ... probe_ddp.py FOLDER KIND [flags of 07]
KIND: plain, in float64; dropout, with a model that has it; killed: so too, but rank 1 fails in the
second epoch and, once that run has resumed, rank 0 is killed in the write of the third checkpoint;
nan: rank 1 gets one image of NaN in the second epoch.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from conftest import ROOT, load
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchvision.datasets import mnist

folder, kind = Path(sys.argv.pop(1)), sys.argv.pop(1)
folder.mkdir(exist_ok=True)
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
script = load("07_ddp.py")
record = {"fetched": [], "train": [], "test": [], "gradients": [], "masks": [], "saved": []}
getitems, build_model, torch_save = script.InMemory.__getitems__, script.build_model, torch.save


def recorded_getitems(self, indices):
    record["test" if torch.is_inference_mode_enabled() else "train"].append(list(indices))
    images, targets = getitems(self, indices)
    if kind == "nan" and rank == "1" and len(record["train"]) == 20:
        images[0] = torch.nan
    return images.double() if kind == "plain" else images, targets


def recorded_step(optimizer, *_):
    gradients = [parameter.grad.flatten() for parameter in optimizer.param_groups[0]["params"]]
    record["gradients"].append(torch.cat(gradients))


def recorded_dropout(dropout, _, outputs):
    if dropout.training:
        record["masks"].append(outputs.flatten()[:784] == 0)
        if kind == "killed" and (rank, restarts, len(record["masks"])) == ("1", "0", 24):
            raise RuntimeError("a fault of rank 1")


def build(width):
    if kind in ("plain", "nan"):
        return build_model(width).to(torch.float64 if kind == "plain" else torch.float32)
    dropout = nn.Dropout(0.2)
    dropout.register_forward_hook(recorded_dropout)
    return nn.Sequential(dropout, *build_model(width))


def save(state, path, **options):
    torch_save(state, path, **options)
    if isinstance(path, str):  # not a buffer, through which tensors are broadcast
        record["saved"].append(path)
        if kind == "killed" and (restarts, state.get("epoch")) == ("1", 3):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def fetch(url, download_root, filename, md5):
    record["fetched"].append(filename)
    time.sleep(0.3)  # enough for processes that would not wait
    name = filename[:-3]  # without .gz
    os.symlink(ROOT / "data" / "MNIST" / "raw" / name, Path(download_root, name))


script.InMemory.__getitems__, script.build_model, torch.save = recorded_getitems, build, save
register_optimizer_step_pre_hook(recorded_step)
mnist.download_and_extract_archive = fetch
script.main()
torch_save(record, folder / f"rank{rank}.pt")
