"""DistributedDataParallel: one process a GPU, on one machine or many; a killed run resumes.

    torchrun --standalone --nproc_per_node=4 07_ddp.py
    torchrun --standalone --nproc_per_node=4 07_ddp.py --checkpoint run.pt  # again: it resumes
    sbatch slurm/ddp.sh
    diff 02_train_gpu.py 07_ddp.py

Small models gain nothing: every step sums all gradients over all processes. --batch-size is shared
out, so that any number of processes trains the model that one trains; raise it to give each GPU
more to do. Batch norm would see a share only: convert it with nn.SyncBatchNorm. --checkpoint is
written after every epoch, without the state of random numbers that dropout would need to go on
exactly. For torchrun --max-restarts, which starts all processes again when one dies, also set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it they may look for dead ones and hang
(https://github.com/pytorch/pytorch/issues/135712).
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
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
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
    parser.add_argument("--checkpoint", type=output_path, help="written every epoch, resumed from")
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


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        logits = model(inputs)
        loss = cross_entropy(logits, targets)
        total_loss += loss.detach()  # .item() would wait for the device at every step
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    dist.all_reduce(total_loss)
    return total_loss.item() / len(loader) / dist.get_world_size()


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


def resume(path, settings, parts):
    """Load the checkpoint at path, if there is one, and return how many epochs it has done.

    Rank 0 reads it for everyone, so the file may lie on a disk that only its node has.
    """
    states = [{"epoch": 0}]
    if dist.get_rank() == 0 and path and path.exists():
        try:
            states = [torch.load(path, map_location="cpu", weights_only=True)]
            if states[0]["settings"] != settings:
                other = dict(states[0]["settings"].items() - settings.items())
                raise ValueError(f"it was made with {other}")
        except Exception as error:
            message = f"cannot resume from {path}: {error!r}; move it away or name another file"
            raise SystemExit(message) from error
    dist.broadcast_object_list(states)
    for name in parts.keys() & states[0].keys():
        parts[name].load_state_dict(states[0][name])
    return states[0]["epoch"]


def main():
    args = parse_args()
    device = args.device
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start it as: torchrun --standalone --nproc_per_node=2 {sys.argv[0]}")
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"more processes than GPUs: use --nproc_per_node={torch.cuda.device_count()}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = args.batch_size // world_size
    if share * world_size != args.batch_size:
        sys.exit(f"--batch-size {args.batch_size} is not a multiple of {world_size} processes")

    torch.manual_seed(args.seed)
    # Rank 0 prepares the data, then one process of each node, whose disk may be its own, then the
    # rest: with two barriers for all, a process comes after as many of them as its turn says.
    turn = 0 if rank == 0 else 1 if local_rank == 0 else 2
    for _ in range(turn):
        dist.barrier()
    train_set = load_data(args.data_dir, train=True, limit=args.limit)
    test_set = load_data(args.data_dir, train=False, limit=args.limit)
    for _ in range(2 - turn):
        dist.barrier()
    steps = len(train_set) // args.batch_size
    if steps == 0:
        sys.exit("too few images for one batch: lower --batch-size or raise --limit")
    # collate_fn=tuple is for InMemory, whose batches come ready made: drop it for other datasets.
    options = {
        "num_workers": args.workers,
        "timeout": 120 if args.workers else 0,  # seconds; without it, a full /dev/shm is a hang
        "pin_memory": device.type == "cuda",
        "collate_fn": tuple,
    }
    # Rank r takes every world_size-th image, so that all shares together are one process's batch.
    # Testing takes a range: DistributedSampler would repeat or drop images to make shares equal.
    train_sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    test_sampler = range(rank, len(test_set), world_size)
    train_loader = DataLoader(train_set, share, sampler=train_sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)
    model = build_model(args.width).to(device, memory_format=torch.channels_last)
    ddp_model = DistributedDataParallel(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    # Up to the peak in a fifth of all updates, then down to zero, both in straight lines.
    shape = {"pct_start": 0.2, "anneal_strategy": "linear", "cycle_momentum": False}
    total_steps = max(6, args.epochs * steps)  # with 5, OneCycleLR divides by zero
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, **shape)

    names = ("epochs", "batch_size", "lr", "width", "limit", "seed")
    settings = {name: getattr(args, name) for name in names}  # without them equal, no resuming
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = resume(args.checkpoint, settings, parts)

    header = f"{device} | torch {torch.__version__} | {len(train_set):,} images"
    if rank == 0:
        print(f"{header} | batch {args.batch_size} | width {args.width}", flush=True)
        if done:
            print(f"resumed | {done}/{args.epochs} epochs were done", flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # else every epoch has the same order
        start = time.perf_counter()
        loss = train(ddp_model, train_loader, optimizer, scheduler, device)
        speed = steps * args.batch_size / (time.perf_counter() - start)
        correct = torch.tensor(evaluate(model, test_loader, device), device=device)
        dist.all_reduce(correct)
        accuracy = correct.item() / len(test_set)
        memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else 0
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        if rank == 0 and args.checkpoint:  # before the line that says that the epoch is done
            states = {name: part.state_dict() for name, part in parts.items()}
            save({**states, "settings": settings, "epoch": epoch}, args.checkpoint)
        if rank == 0:
            print(f"{result} | {speed:,.0f} images/s | gpu memory {memory:.0f} MiB", flush=True)
    if rank == 0 and args.save:
        save(model.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
