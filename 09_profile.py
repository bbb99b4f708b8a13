"""Profiling: where the time of a training step goes.

    python 09_profile.py --trace trace.json
    diff -w 02_train_gpu.py 09_profile.py

Profiling slows the steps it records, so read shares off it and speeds off 02. Three steps suffice,
after some to warm up; the rest of the run is not recorded. "Self" time excludes the operations
inside. On a GPU a region's CPU time is that of launching its work: sort by the device's own time.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets


def positive_int(text):
    if int(text) < 1:
        raise ValueError
    return int(text)


def output_path(text):
    path = Path(text).resolve()
    usable = path.is_file() or not path.exists()
    if not (usable and path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"no file can be written at {text}")
    return path


def parse_args():
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    device = "cuda" if torch.cuda.is_available() else device
    data_dir = Path(__file__).resolve().with_name("data")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=data_dir, help="holds MNIST/raw")
    parser.add_argument("--device", type=torch.device, default=device, help="cuda:1, mps, cpu, ...")
    parser.add_argument("--epochs", type=positive_int, default=2)
    parser.add_argument("--batch-size", type=positive_int, default=480, help="images per update")
    parser.add_argument("--lr", type=float, default=0.015, help="the peak of the schedule")
    parser.add_argument("--width", type=positive_int, default=8, help="channels, first layer")
    parser.add_argument("--limit", type=positive_int, help="only the first N images of each set")
    parser.add_argument("--workers", type=int, default=0, help="processes that load the data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=output_path, help="file for the trained weights")
    parser.add_argument("--trace", type=output_path, default="trace.json", help="Chrome trace")
    return parser.parse_args()


class InMemory(TensorDataset):
    """Hands a DataLoader whole batches: one gather instead of batch_size Python calls."""

    def __getitems__(self, indices):
        indices = torch.tensor(indices)
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


def load_data(data_dir, train, limit):
    """MNIST, decoded and normalised once: inputs float32 [N, 1, 28, 28], targets int64 [N]."""
    raw = data_dir / "MNIST" / "raw"
    try:
        if not all((raw / name[:-3]).exists() for name, _ in datasets.MNIST.resources):
            raw.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=data_dir) as folder:
                shutil.copytree(raw, Path(folder, "MNIST", "raw"))
                datasets.MNIST(folder, download=True)
                for path in Path(folder, "MNIST", "raw").iterdir():
                    path.replace(raw / path.name)  # at once: no other run sees half a file
        mnist = datasets.MNIST(data_dir, train)
        inputs = (mnist.data[:limit, None] / 255 - 0.1307) / 0.3081
        return InMemory(inputs, mnist.targets[:limit])
    except Exception as error:
        message = f"cannot load MNIST: {error!r}; put only its four .gz files in a writable {raw}"
        raise SystemExit(message) from error


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=5, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 5 * 5, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(model, loader, optimizer, scheduler, device, profiler):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = torch.zeros((), device=device)
    batches = iter(loader)
    for _ in range(len(loader)):
        with record_function("data"):
            inputs, targets = next(batches)
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
        with record_function("forward"):
            logits = model(inputs)
            loss = cross_entropy(logits, targets)
        total_loss += loss.detach()  # .item() would wait for the device at every step
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        profiler.step()
    return total_loss.item() / len(loader)


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return how many images are classified correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        logits = model(inputs)
        correct += (logits.argmax(dim=1) == targets).sum()
    return correct.item()


def save(state, path):
    """Write aside, then rename, so that a kill or a full disk leaves an older file whole.

    Any device loads it: torch.load(path, map_location=device, weights_only=True).
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, Path(folder, "new"))
        os.replace(Path(folder, "new"), path)


def main():
    args = parse_args()
    device = args.device

    torch.manual_seed(args.seed)
    train_set = load_data(args.data_dir, train=True, limit=args.limit)
    test_set = load_data(args.data_dir, train=False, limit=args.limit)
    steps = len(train_set) // args.batch_size
    if steps == 0:
        sys.exit("too few images for one batch: lower --batch-size or raise --limit")
    if args.epochs * steps < 15:
        sys.exit("the profile takes 15 steps: lower --batch-size or raise --limit or --epochs")
    # collate_fn=tuple is for InMemory, whose batches come ready made: drop it for other datasets.
    options = {
        "num_workers": args.workers,
        "timeout": 120 if args.workers else 0,  # seconds; without it, a full /dev/shm is a hang
        "pin_memory": device.type == "cuda",
        "collate_fn": tuple,
    }
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **options)
    test_loader = DataLoader(test_set, args.batch_size, **options)
    model = build_model(args.width).to(device, memory_format=torch.channels_last)

    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    # Up to the peak in a fifth of all updates, then down to zero, both in straight lines.
    shape = {"pct_start": 0.2, "anneal_strategy": "linear", "cycle_momentum": False}
    total_steps = max(6, args.epochs * steps)  # with 5, OneCycleLR divides by zero
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, **shape)

    header = f"{device} | torch {torch.__version__} | {len(train_set):,} images"
    print(f"{header} | batch {args.batch_size} | width {args.width}", flush=True)
    new_trace = args.trace.with_name(f"new-{args.trace.name}")
    profiler = profile(
        schedule=schedule(wait=10, warmup=2, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(new_trace)),
    )
    profiler.start()
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        loss = train(model, train_loader, optimizer, scheduler, device, profiler)
        speed = steps * args.batch_size / (time.perf_counter() - start)
        accuracy = evaluate(model, test_loader, device) / len(test_set)
        memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else 0
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        print(f"{result} | {speed:,.0f} images/s | gpu memory {memory:.0f} MiB", flush=True)
    if args.save:
        save(model.state_dict(), args.save)
    profiler.stop()
    own_time = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    print(profiler.key_averages().table(sort_by=own_time, row_limit=15, max_name_column_width=40))
    os.replace(new_trace, args.trace)  # fails if the profiler could not write it: it only logs that
    print(f"trace | {args.trace} | open it at https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
