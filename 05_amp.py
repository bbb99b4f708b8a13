"""Automatic mixed precision: convolutions and matrix products in 16 bits, parameters in 32.

    python 05_amp.py
    python 05_amp.py --dtype float16
    git diff --no-index -w 02_train_gpu.py 05_amp.py

No gain on small models, nor without 16-bit units: a CPU that lacks them is slower, with float16
many times. bfloat16, for CUDA GPUs of capability 8.0 or more, has the range of float32. float16 is
for older ones: gradients leave its range, so a GradScaler scales the loss, skips the steps that
overflow, the first few among them, and waits for the GPU every step. Evaluation stays in float32,
to be compared with 02: put autocast there too, if its speed matters.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets


def parse_args():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_dir = Path(__file__).resolve().with_name("data")
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    parser.add_argument("--data-dir", default=data_dir, help="holds MNIST/raw, or will")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], default=device, help="mps: Mac")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training set")
    parser.add_argument("--batch-size", type=int, default=480, help="images per update")
    parser.add_argument("--lr", type=float, default=0.015, help="the peak of the schedule")
    parser.add_argument("--width", type=int, help="channels, layer 1; None: 256 on cuda, else 8")
    parser.add_argument("--limit", type=int, help="only the first N images of each set")
    parser.add_argument("--workers", type=int, default=0, help="processes that load the data")
    parser.add_argument("--seed", type=int, default=0, help="of weights and shuffling")
    parser.add_argument("--save", help="file for the trained weights")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="None: by the device")
    args = parser.parse_args()
    if args.width is None:
        args.width = 256 if args.device == "cuda" else 8
    return args


# All that is MNIST, for you to replace: down to build_model, and lr, betas and label_smoothing.
class InMemory(TensorDataset):
    """Indexes a whole batch at once; with any other dataset, remove collate_fn=tuple below."""

    def __getitems__(self, indices):  # the DataLoader calls it with all indices of a batch
        return tuple(tensor.index_select(0, torch.tensor(indices)) for tensor in self.tensors)


def load_data(args):
    """Two DataLoaders: inputs float32 [B, 1, 28, 28], mean 0, deviation 1; targets int64 [B]."""
    sets = []
    for is_train in True, False:
        mnist = datasets.MNIST(args.data_dir, is_train, download=True)  # unless it is there
        images = mnist.data[: args.limit, None].float().div_(255).sub_(0.1307).div_(0.3081)
        sets.append(InMemory(images, mnist.targets[: args.limit]))
    train_set, test_set = sets
    shared = {"num_workers": args.workers, "pin_memory": args.device == "cuda", "collate_fn": tuple}
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **shared)
    test_loader = DataLoader(test_set, args.batch_size, **shared)
    if len(train_loader) == 0:
        raise SystemExit("too few images for one batch: lower --batch-size or raise --limit")
    return train_loader, test_loader


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=6, stride=2),  # 28 x 28 to 12 x 12
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3),  # to 10 x 10
        nn.MaxPool2d(2),  # to 5 x 5
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 5 * 5, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(model, loader, optimizer, scheduler, device, dtype, scaler):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # from pinned memory: async
        targets = targets.to(device, non_blocking=loader.pin_memory)
        with torch.autocast(device.type, dtype):
            logits = model(inputs)
            loss = cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # drops the graph; .item() here would wait for the GPU
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # so that true gradients are clipped
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()  # read here: step has waited for the GPU, update changes it
        scaler.update()
        if scaler.get_scale() >= scale:  # else the gradients overflowed and the step was skipped
            scheduler.step()  # once a batch, not once an epoch
        optimizer.zero_grad()
    return total_loss.item() / len(loader)


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return how many images are classified correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)
        targets = targets.to(device, non_blocking=loader.pin_memory)
        correct += (model(inputs).argmax(dim=1) == targets).sum()
    return correct.item()


def save(state, path):
    """Write aside, then rename: a kill or a full disk leaves an older file whole."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def main():
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    train_loader, test_loader = load_data(args)
    # Channels last in memory makes convolutions fastest, but some MPS versions get it wrong.
    layout = torch.contiguous_format if args.device == "mps" else torch.channels_last
    model = build_model(args.width).to(device, memory_format=layout)

    # So few updates need a shorter memory than that of Adam's own betas, 0.9 and 0.999.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    total_steps = args.epochs * len(train_loader)  # cycle_momentum would overwrite the betas
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, cycle_momentum=False)
    old_gpu = args.device == "cuda" and torch.cuda.get_device_capability() < (8, 0)
    dtype = getattr(torch, args.dtype or ("float16" if old_gpu else "bfloat16"))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    header += f" | {dtype}"
    print(header, flush=True)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()  # true time: train's .item() awaits the GPU
        loss = train(model, train_loader, optimizer, scheduler, device, dtype, scaler)
        speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
        accuracy = evaluate(model, test_loader, device) / len(test_loader.dataset)
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        result += f" | {speed:,.0f} images/s"
        if args.device == "cuda":
            result += f" | gpu memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        if args.save:
            save(model.state_dict(), args.save)
        print(result, flush=True)


if __name__ == "__main__":
    main()
