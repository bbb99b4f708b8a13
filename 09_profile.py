"""Profiling: where the time of a training step goes.

    python 09_profile.py --trace trace.json
    git diff --no-index -w 02_train_gpu.py 09_profile.py

Profiling slows the steps it records, so read shares off it and speeds off 02. It records the last
three steps of the first epoch: warmed up, and before any evaluation. "Self" time excludes what is
called inside. On a CUDA GPU the shares and the order are those of its own time, since Python only
launches the work; what is left of a step, the GPU waited: for data, for copies or for Python.
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
from torch.profiler import profile, record_function, schedule
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
    parser.add_argument("--trace", default="trace.json", help="timeline, for ui.perfetto.dev")
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


def train(model, loader, optimizer, scheduler, device, prof):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # from pinned memory: async
        targets = targets.to(device, non_blocking=loader.pin_memory)
        with record_function("forward"):
            logits = model(inputs)
            loss = cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # drops the graph; .item() here would wait for the GPU
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()  # once a batch, not once an epoch
            optimizer.zero_grad()
        prof.step()
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

    wait = len(train_loader) - 4  # so that the active steps are the last of the first epoch
    if wait < 0:
        raise SystemExit("an epoch needs 4 steps here: lower --batch-size or raise --limit")
    torch.autograd.set_multithreading_enabled(False)  # else "backward" misses its kernels

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    print(header, flush=True)
    with profile(schedule=schedule(wait=wait, warmup=1, active=3, repeat=1)) as prof:
        for epoch in range(1, args.epochs + 1):
            start = time.perf_counter()  # true time: train's .item() awaits the GPU
            loss = train(model, train_loader, optimizer, scheduler, device, prof)
            speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
            accuracy = evaluate(model, test_loader, device) / len(test_loader.dataset)
            result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
            result += f" | {speed:,.0f} images/s"
            if args.device == "cuda":
                result += f" | gpu memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
            if args.save:
                save(model.state_dict(), args.save)
            print(result, flush=True)

    rows = prof.key_averages()
    cpu = {row.key: row for row in rows if row.device_type.name == "CPU"}
    gpu = [row for row in rows if row.key not in cpu]  # ran there; regions count as CPU
    own = "device_time_total" if gpu else "cpu_time_total"
    rows[:] = [*cpu.values(), *gpu]
    print(rows.table(sort_by=f"self_{own}", row_limit=15, max_name_column_width=40))
    times = [event.time_range for event in prof.events()]
    span = max(time.end for time in times) - min(time.start for time in times)
    shares = {name: getattr(cpu[name], own) / span for name in ("forward", "backward", "optimizer")}
    shares["data or waiting"] = 1 - sum(shares.values())
    print(f"a step by {own} |", " | ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    prof.export_chrome_trace(args.trace)
    print(f"trace | {args.trace} | {os.path.getsize(args.trace):,} bytes")  # else only logged


if __name__ == "__main__":
    main()
