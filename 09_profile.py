"""The profiler: where the time of a training step goes.

    python 09_profile.py --epochs 1 --trace trace.json
    git diff --no-index -w 02_train_gpu.py 09_profile.py  # what it adds to 02

Profiling slows down what it records: measure the throughput with 02. The last steps of the first
epoch are recorded: 3, or as many as --workers if that is more. Warm-up steps before are discarded.
The lines at the end give the mean per step: the CPU time of each part and, on CUDA, the time of the
GPU kernels it launched. ProfilerStep* is the whole step. The larger of its two times limits the
speed: if it is the GPU's, try 05 or 08. If it is the CPU's, look at enumerate(DataLoader): if this
wait for data is long, raise --workers; else try 08. In the table, "Self CPU" excludes the operators
that a row's own operator calls, and "CPU total" includes them.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import MNIST


def parse_args():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data-dir", default=Path(__file__).resolve().with_name("data"), help="folder for MNIST")
    add("--device", choices=["cuda", "cpu", "mps"], default=device, help="default: cuda, else cpu")
    add("--epochs", type=int, default=2, help="passes over the training set (default: %(default)s)")
    add("--batch-size", type=int, default=480, help="images per update (default: %(default)s)")
    add("--lr", type=float, default=0.015, help="peak learning rate (default: %(default)s)")
    add("--width", type=int, help="channels of layer 1 (default: 256 on CUDA, otherwise 8)")
    add("--limit", type=int, help="use only the first LIMIT images of each set")
    add("--workers", type=int, default=0, help="DataLoader worker processes (default: %(default)s)")
    add("--seed", type=int, default=0, help="for weights and shuffling (default: %(default)s)")
    add("--save", help="file for weights, written after every epoch (resume: --checkpoint in 07)")
    add("--trace", default="trace.json", help="timeline for ui.perfetto.dev (default: %(default)s)")
    args = parser.parse_args()
    args.width = args.width or (256 if args.device == "cuda" else 8)  # 256 keeps a GPU busy
    return args


# For your own data, change load_data and build_model; for another task, also loss and accuracy.
# For tensors, keep InMemory. With your own Dataset, delete InMemory and the "collate_fn" line.
class InMemory(TensorDataset):  # takes a whole batch out of the tensors at once, which is faster
    def __getitems__(self, indices):  # plural: the DataLoader passes all indices of a batch
        return tuple(tensor[indices] for tensor in self.tensors)


def load_data(args):
    """Return DataLoaders of normalized float32 images [B, 1, 28, 28] and int64 classes [B]."""
    sets = []
    for is_train in True, False:
        mnist = MNIST(args.data_dir, train=is_train, download=True)
        images = (mnist.data[: args.limit].unsqueeze(1) / 255 - 0.1307) / 0.3081  # mean and std
        sets.append(InMemory(images, mnist.targets[: args.limit]))
    common = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}  # for async copies
    common["collate_fn"] = tuple  # only for InMemory, whose __getitems__ returns a complete batch
    train_loader = DataLoader(sets[0], args.batch_size, shuffle=True, drop_last=True, **common)
    if len(train_loader) == 0:
        raise SystemExit("too few images for one batch: lower --batch-size or raise --limit")
    return train_loader, DataLoader(sets[1], args.batch_size, **common)


def build_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=6, stride=2),  # 28 x 28 -> 12 x 12
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3),  # -> 10 x 10
        nn.MaxPool2d(2),  # -> 5 x 5
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 5 * 5, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(model, loader, optimizer, scheduler, device, prof):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = 0
    for inputs, targets in loader:  # on a GPU, the lines below only queue work (asynchronous)
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # queued too if pin_memory
        targets = targets.to(device, non_blocking=loader.pin_memory)
        with record_function("forward"):
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # loss.item() would wait for the GPU in every step
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # optional
            optimizer.step()
            scheduler.step()  # OneCycleLR: once per batch. Most others: once per epoch
            optimizer.zero_grad()
        prof.step()  # the schedule counts these calls
    return total_loss.item() / len(loader)  # exact, as all batches have one size (drop_last=True)


@torch.inference_mode()  # no gradients: like no_grad, but faster
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for inputs, targets in loader:
        predictions = model(inputs.to(device)).argmax(dim=1)
        correct += (predictions == targets.to(device)).sum()
    return correct.item() / len(loader.dataset)  # the accuracy


def save(state, path):  # atomic: an interrupted save leaves the older file intact
    path = Path(path).resolve()  # if path is a symbolic link, replace its target, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, f"{folder}/new")
        Path(folder, "new").replace(path)


def main():
    args = parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train_loader, test_loader = load_data(args)
    model = build_model(args.width).to(device)
    if args.device != "mps":  # mps (Apple GPU): channels_last was wrong in some PyTorch versions
        model.to(memory_format=torch.channels_last)  # faster Conv2d memory order; inputs unchanged

    # For other data, use --lr 0.001 and delete betas and label_smoothing: they are tuned for MNIST.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    steps = args.epochs * len(train_loader)  # OneCycleLR: lr rises, then falls; betas are constant
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=steps, cycle_momentum=False)
    # As the profiler starts, each worker gets 2 batches ready. Discard them: they hide the wait.
    warmup, active = 1 + 2 * args.workers, max(3, args.workers)  # steps to discard, to record
    wait = len(train_loader) - warmup - active  # steps to skip first; set 10 if an epoch is long
    if wait < 0:
        raise SystemExit(f"an epoch needs {warmup + active} steps: choose a lower --batch-size")
    torch.autograd.set_multithreading_enabled(False)  # for the GPU time of backward; delete later

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    print(header, flush=True)
    with profile(schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1)) as prof:
        for epoch in range(1, args.epochs + 1):
            start = time.perf_counter()  # a correct time, as train's .item() waits for the GPU
            loss = train(model, train_loader, optimizer, scheduler, device, prof)
            speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
            accuracy = evaluate(model, test_loader, device)
            result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
            result += f" | {speed:,.0f} images/s"
            if args.device == "cuda":
                result += f" | peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
            if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
                raise SystemExit(f"{result} | NaN or infinity in the weights: not saved")
            if args.save:
                save(model.state_dict(), args.save)  # README.md shows how to load it
            print(result, flush=True)

    rows = prof.key_averages()  # one per name and device; a name can end in "#" and a detail
    sort_by = "self_device_time_total" if args.device == "cuda" else "self_cpu_time_total"
    print(rows.table(sort_by=sort_by, row_limit=15, max_name_column_width=40))
    parts = {row.key.split("#")[0]: row for row in rows if row.device_type.name == "CPU"}
    for name in "ProfilerStep*", "enumerate(DataLoader)", "forward", "backward", "optimizer":
        row = parts[name]  # PyTorch adds the first two; times are means per call, in microseconds
        on_gpu = f" | GPU {row.device_time / 1000:8.2f} ms" if args.device == "cuda" else ""
        print(f"{name:21} | CPU {row.cpu_time / 1000:8.2f} ms{on_gpu} per step")
    trace = Path(args.trace).resolve()
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=trace.parent) as folder:
        prof.export_chrome_trace(f"{folder}/{trace.name}")  # it only logs a failure
        Path(folder, trace.name).replace(trace)  # raises an error then, and an older trace stays
    print(f"trace | {args.trace} | {trace.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
