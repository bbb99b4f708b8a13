"""DistributedDataParallel: one process per GPU, on one or more nodes (machines); it can resume.

    torchrun --standalone --nproc_per_node=4 07_ddp.py --checkpoint run.pt  # or sbatch slurm/ddp.sh
    git diff --no-index -w 02_train_gpu.py 07_ddp.py  # what it adds to 02

torchrun starts 4 copies (use your number of GPUs), each with a number, its rank. Small models gain
nothing: every backward pass has to average (all-reduce) the gradients. Only ddp_model does that:
train it, but evaluate and save `model`, which has the same weights. --batch-size is the effective
(global) batch size, split across the processes, so keep the learning rate. BatchNorm uses only the
local part. On GPUs, put model = nn.SyncBatchNorm.convert_sync_batchnorm(model) above ddp_model.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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
    add("--checkpoint", help="file to resume from, written after every epoch")
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
    if os.environ["LOCAL_RANK"] == "0":  # one download per node, by its first process
        MNIST(args.data_dir, download=True)  # if nodes share the folder, run 02 once before
    dist.barrier()  # the other processes wait for it here
    sets = []
    for is_train in True, False:
        mnist = MNIST(args.data_dir, train=is_train, download=True)
        images = (mnist.data[: args.limit].unsqueeze(1) / 255 - 0.1307) / 0.3081  # mean and std
        sets.append(InMemory(images, mnist.targets[: args.limit]))
    common = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}  # for async copies
    common["collate_fn"] = tuple  # only for InMemory, whose __getitems__ returns a complete batch
    local_batch_size = args.batch_size // dist.get_world_size()
    sampler = DistributedSampler(sets[0], seed=args.seed, drop_last=True)  # shuffles; equal parts
    train_loader = DataLoader(sets[0], local_batch_size, sampler=sampler, drop_last=True, **common)
    if len(train_loader) == 0:
        raise SystemExit("too few images for one batch: lower --batch-size or raise --limit")
    # Any range is a sampler. To get equal parts, DistributedSampler would repeat or drop images.
    part = range(dist.get_rank(), len(sets[1]), dist.get_world_size())
    return train_loader, DataLoader(sets[1], local_batch_size, sampler=part, **common)


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


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = 0
    for inputs, targets in loader:  # on a GPU, the lines below only queue work (asynchronous)
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # queued too if pin_memory
        targets = targets.to(device, non_blocking=loader.pin_memory)
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # loss.item() would wait for the GPU in every step
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # optional
        optimizer.step()
        scheduler.step()  # OneCycleLR: once per batch. Most others: once per epoch
        optimizer.zero_grad()
    dist.all_reduce(total_loss)  # in place, needs a tensor: the sum over all ranks
    return total_loss.item() / len(loader) / dist.get_world_size()


@torch.inference_mode()  # no gradients: like no_grad, but faster
def evaluate(model, loader, device):
    model.eval()
    correct = 0
    for inputs, targets in loader:
        predictions = model(inputs.to(device)).argmax(dim=1)
        correct += (predictions == targets.to(device)).sum()
    dist.all_reduce(correct)
    return correct.item() / len(loader.dataset)  # the accuracy


def save(state, path):  # atomic: an interrupted save leaves the older file intact
    path = Path(path).resolve()  # if path is a symbolic link, replace its target, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        torch.save(state, f"{folder}/new")
        Path(folder, "new").replace(path)


def resume(path, flags, model, optimizer, scheduler):
    """Load the checkpoint, if any, and return its epoch. Add your own settings to flags in main."""
    exists = dist.get_rank() == 0 and path and os.path.exists(path)  # only rank 0 reads the file
    found = [torch.load(path, map_location="cpu", weights_only=True) if exists else {"epoch": 0}]
    dist.broadcast_object_list(found)  # in place: all get what rank 0 has read
    checkpoint = found[0]
    if checkpoint["epoch"] > 0:
        changed = {name: old for name, old in checkpoint["flags"].items() if old != flags.get(name)}
        if changed:
            raise SystemExit(f"{path} was written with {changed}: resume with the same flags")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    return checkpoint["epoch"]


def main():
    args = parse_args()
    device = torch.device(args.device)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"start it as: torchrun --standalone --nproc_per_node=2 {__file__}")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # one GPU per process
    # NCCL communicates between GPUs. Gloo communicates between CPUs: it sends the checkpoint.
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()  # own number; number of processes
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size must be a multiple of the {world_size} processes")
    torch.manual_seed(args.seed)
    train_loader, test_loader = load_data(args)
    model = build_model(args.width).to(device)
    if args.device != "mps":  # mps (Apple GPU): channels_last was wrong in some PyTorch versions
        model.to(memory_format=torch.channels_last)  # faster Conv2d memory order; inputs unchanged
    ddp_model = nn.parallel.DistributedDataParallel(model)  # train this, or nothing is averaged

    # For other data, use --lr 0.001 and delete betas and label_smoothing: they are tuned for MNIST.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    steps = args.epochs * len(train_loader)  # OneCycleLR: lr rises, then falls; betas are constant
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=steps, cycle_momentum=False)
    flags = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "limit", "seed")}
    done = resume(args.checkpoint, flags, model, optimizer, scheduler)

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    header += f" | world size {world_size}"
    header += f"\nresumed | {done}/{args.epochs} epochs were done" if done else ""
    header += ": nothing is left to train or to save" if done == args.epochs else ""
    if rank == 0:
        print(header, flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        train_loader.sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        torch.manual_seed(args.seed + epoch * world_size + rank)  # different dropout on every rank
        start = time.perf_counter()  # a correct time, as train's .item() waits for the GPU
        loss = train(ddp_model, train_loader, optimizer, scheduler, device)
        speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
        accuracy = evaluate(model, test_loader, device)
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        result += f" | {speed:,.0f} images/s"
        if args.device == "cuda":
            result += f" | peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
            raise SystemExit(f"{result} | NaN or infinity in the weights: not saved")
        if rank == 0:
            if args.save:
                save(model.state_dict(), args.save)  # README.md shows how to load it
            if args.checkpoint:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "flags": flags, "epoch": epoch}
                save(state, args.checkpoint)
            print(result, flush=True)
    time.sleep(0.1)  # lets the threads of Gloo finish: otherwise torch can hang or abort at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
