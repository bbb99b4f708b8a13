"""Automatic mixed precision (AMP): autocast computes convolutions and matrix products in 16 bits.

    python 05_amp.py
    python 05_amp.py --dtype float16
    git diff --no-index -w 02_train_gpu.py 05_amp.py  # what it adds to 02

It pays off if the model keeps the GPU busy, and if the hardware supports the type: bfloat16 on GPUs
since Ampere (A100, RTX 30) and on CPUs with AVX512-BF16 or AMX; float16 on GPUs since V100. On
other CPUs it is slower. bfloat16 has the range of float32, so it needs only autocast. With float16,
small gradients underflow, that is, become zero. Therefore a GradScaler multiplies the loss by a
large factor. If gradients overflow, it skips this step (usual at the start) and lowers the factor.
To detect overflows, it makes the CPU wait once per step. Evaluation could use autocast as well.
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
    add("--dtype", choices=["bfloat16", "float16"], help="default: bfloat16, on old GPUs float16")
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


def train(model, loader, optimizer, device, dtype, scaler):
    """Train for one epoch and return the mean loss."""
    model.train()
    total_loss = 0
    for inputs, targets in loader:  # on a GPU, the lines below only queue work (asynchronous)
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # queued too if pin_memory
        targets = targets.to(device, non_blocking=loader.pin_memory)
        with torch.autocast(device.type, dtype):  # forward and loss only; weights stay float32
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.05)
        total_loss += loss.detach()  # loss.item() would wait for the GPU in every step
        scaler.scale(loss).backward()  # bfloat16: scaler off, = loss.backward(), optimizer.step()
        scaler.unscale_(optimizer)  # only for clipping, which needs the true, unscaled gradients
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # optional
        scaler.step(optimizer)  # skips after an overflow; delete scheduler.step(), see hook in main
        scaler.update()  # adapts the factor
        optimizer.zero_grad()
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
    optimizer.register_step_post_hook(lambda *_: scheduler.step())  # for per-batch schedulers only
    old_gpu = args.device == "cuda" and torch.cuda.get_device_capability() < (8, 0)  # before Ampere
    dtype = getattr(torch, args.dtype or ("float16" if old_gpu else "bfloat16"))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # off for bfloat16

    header = f"{device} | torch {torch.__version__} | {len(train_loader.dataset):,} images"
    header += f" | batch {args.batch_size} | width {args.width}"
    header += f" | {dtype}"
    print(header, flush=True)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()  # a correct time, as train's .item() waits for the GPU
        loss = train(model, train_loader, optimizer, device, dtype, scaler)
        speed = len(train_loader) * args.batch_size / (time.perf_counter() - start)
        accuracy = evaluate(model, test_loader, device)
        result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"
        result += f" | {speed:,.0f} images/s"
        if args.device == "cuda":
            result += f" | peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
        if not all(tensor.isfinite().all() for tensor in model.state_dict().values()):
            raise SystemExit(f"{result} | NaN or infinity in the weights: not saved")
        if scheduler.last_epoch < epoch * len(train_loader) / 10:  # it counts the steps taken
            raise SystemExit(f"{result} | float16 overflows in nearly every step: not saved")
        if args.save:
            save(model.state_dict(), args.save)  # README.md shows how to load it
        print(result, flush=True)


if __name__ == "__main__":
    main()
