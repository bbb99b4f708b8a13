"""DistributedDataParallel: one process a GPU, on one machine or many; a killed run resumes.

    torchrun --standalone --nproc_per_node=4 07_ddp.py --checkpoint run.pt  # or sbatch slurm/ddp.sh
    git diff --no-index -w 02_train_gpu.py 07_ddp.py

Small models gain nothing: every step averages all gradients over all processes. --batch-size is
shared out, so that one process of 07 or many train the same model. Batch norm sees a share: on GPUs
take nn.SyncBatchNorm. --checkpoint keeps the last finished epoch: the same command goes on there.
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
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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
    parser.add_argument("--checkpoint", help="written every epoch, resumed from")
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
    if os.environ["LOCAL_RANK"] == "0":  # one a node; on a shared disk, run 02 before
        datasets.MNIST(args.data_dir, download=True)
    dist.barrier()
    sets = []
    for is_train in True, False:
        mnist = datasets.MNIST(args.data_dir, is_train, download=True)  # unless it is there
        images = mnist.data[: args.limit, None].float().div_(255).sub_(0.1307).div_(0.3081)
        sets.append(InMemory(images, mnist.targets[: args.limit]))
    train_set, test_set = sets
    shared = {"num_workers": args.workers, "pin_memory": args.device == "cuda", "collate_fn": tuple}
    share = args.batch_size // dist.get_world_size()
    train_sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    # A range, as DistributedSampler would repeat or drop test images to make the shares equal.
    test_sampler = range(dist.get_rank(), len(test_set), dist.get_world_size())
    train_loader = DataLoader(train_set, share, sampler=train_sampler, drop_last=True, **shared)
    test_loader = DataLoader(test_set, share, sampler=test_sampler, **shared)
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


def train(model, loader, optimizer, scheduler, device):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = torch.zeros((), device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # from pinned memory: async
        targets = targets.to(device, non_blocking=loader.pin_memory)
        logits = model(inputs)
        loss = cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # drops the graph; .item() here would wait for the GPU
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()  # once a batch, not once an epoch
        optimizer.zero_grad()
    dist.all_reduce(total_loss)  # the sum over all processes
    return total_loss.item() / len(loader) / dist.get_world_size()


@torch.inference_mode()
def evaluate(model, loader, device):
    """Return how many images are classified correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)
        targets = targets.to(device, non_blocking=loader.pin_memory)
        correct += (model(inputs).argmax(dim=1) == targets).sum()
    dist.all_reduce(correct)
    return correct.item()


def save(state, path):
    """Write aside, then rename: a kill or a full disk leaves an older file whole."""
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)


def resume(path, settings, parts):
    """Load the checkpoint at path, if there is one, and return how many epochs it has done."""
    found = [{"epoch": 0}]  # rank 0 reads for everyone: the disk may be its own
    if dist.get_rank() == 0 and path and os.path.exists(path):
        found = [torch.load(path, map_location="cpu", weights_only=True)]
        if found[0]["settings"] != settings:
            raise SystemExit(f"{path} was made with {found[0]['settings']}, not with {settings}")
    dist.broadcast_object_list(found)
    if found[0]["epoch"] > 0:
        for name, part in parts.items():
            part.load_state_dict(found[0][name])
    return found[0]["epoch"]


def main():
    args = parse_args()
    device = torch.device(args.device)
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit(f"start it as: torchrun --standalone --nproc_per_node=2 {__file__}")
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        if 0 < gpus <= local_rank:  # without any, torch says so
            raise SystemExit(f"more processes than GPUs: use --nproc_per_node={gpus}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size must be a multiple of the {world_size} processes")
    torch.manual_seed(args.seed)

    train_loader, test_loader = load_data(args)
    # Channels last in memory makes convolutions fastest, but some MPS versions get it wrong.
    layout = torch.contiguous_format if args.device == "mps" else torch.channels_last
    model = build_model(args.width).to(device, memory_format=layout)
    ddp_model = nn.parallel.DistributedDataParallel(model)  # its backward averages gradients

    # So few updates need a shorter memory than that of Adam's own betas, 0.9 and 0.999.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.7, 0.9))
    total_steps = args.epochs * len(train_loader)  # cycle_momentum would overwrite the betas
    scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, cycle_momentum=False)

    names = "epochs", "batch_size", "lr", "width", "limit", "seed"
    settings = {name: getattr(args, name) for name in names}  # to resume, they must be the same
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = resume(args.checkpoint, settings, parts)

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    header += f" | {world_size} processes"
    header += f"\nresumed | {done}/{args.epochs} epochs were done" if done else ""
    if rank == 0:
        print(header, flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        train_loader.sampler.set_epoch(epoch)  # else every epoch has the same order
        torch.manual_seed(hash((args.seed, epoch, rank)))  # other dropout in each, also resumed
        start = time.perf_counter()  # true time: train's .item() awaits the GPU
        loss = train(ddp_model, train_loader, optimizer, scheduler, device)
        speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
        accuracy = evaluate(model, test_loader, device) / len(test_loader.dataset)
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        result += f" | {speed:,.0f} images/s"
        if args.device == "cuda":
            result += f" | gpu memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        if rank == 0:
            if args.checkpoint:
                states = {name: part.state_dict() for name, part in parts.items()}
                save({**states, "settings": settings, "epoch": epoch}, args.checkpoint)
            if args.save:
                save(model.state_dict(), args.save)
            print(result, flush=True)
    dist.barrier()  # without it, torch 2.4 with gloo often hangs at the exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
