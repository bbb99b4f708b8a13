"""Devices: choose one, move tensors and models to it, and time the work that is done there.

    python 01_device_basics.py
    python 01_device_basics.py --device cpu

A GPU pays off for large amounts of work: each call has a fixed cost, and so has each copy. Read the
file from top to bottom; each function prints what it shows. The last lines printed compare the CPU
with the GPU.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torchvision.datasets import MNIST


def show_devices():
    """Print this machine's devices: "cuda" is an NVIDIA or AMD (ROCm) GPU, "mps" a Mac's GPU."""
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    print(f"torch {torch.__version__} | built for {built} | {torch.get_num_threads()} CPU threads")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        # The compute capability is the version of the GPU's architecture, such as 8.0.
        print(f"cuda:{index} | {gpu.name} | {memory} | compute capability {gpu.major}.{gpu.minor}")
    print(f"mps | available: {torch.backends.mps.is_available()}")


def move_tensors(device):
    """A tensor stays where it was created: .to() returns a copy on the other device."""
    original = torch.arange(3.0)
    copy = original.to(device)
    created = torch.zeros(3, device=device)  # better than torch.zeros(3).to(device): no copy
    print(f"created on {original.device}, copied to {copy.device}, created on {created.device}")
    print(f".to() returned the same tensor: {copy is original} (True if it is on {device} already)")

    # model.to(device) moves its parameters and buffers in place. A tensor needs x = x.to(device).
    model = nn.Linear(3, 2)
    model.to(device)
    print(f"the model is on {model.weight.device}")

    # NumPy can use neither GPU memory nor tensors that require gradients.
    output = model(created).detach().cpu().numpy()
    print(f"as a NumPy {type(output).__name__}: shape {output.shape}")


def mix_devices(device):
    """All tensors of an operation must be on one device: this is the most common error on a GPU."""
    # Without a GPU, the second device is "meta", whose tensors have a shape but no data.
    other = "meta" if device.type == "cpu" else "cpu"
    model = nn.Linear(3, 2, device=device)
    try:
        model(torch.ones(1, 3, device=other))
    except RuntimeError as error:
        print(f"RuntimeError: {error}")
    output = model(torch.ones(1, 3, device=device))
    print(f"corrected: inputs and model are on {device}, the output is {tuple(output.shape)}")


def synchronize(device):
    """Wait until the GPU has done all work: calls that use it only queue work and return early."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def milliseconds(device, work, *args):
    """Return the median time of ten calls of work(*args), after one for warm-up."""
    work(*args)  # the first call also loads libraries: never time it
    times = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        work(*args)
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def time_work(device):
    """GPU work is asynchronous: a call returns when the work is queued, not when it is done."""
    a = torch.randn(1024, 1024, device=device)
    complete = milliseconds(device, torch.mm, a, a)
    start = time.perf_counter()
    torch.mm(a, a)
    queued = 1000 * (time.perf_counter() - start)
    print(f"1024 x 1024 matmul | with synchronize {complete:.3f} ms | without {queued:.3f} ms")
    devices = [device] if device.type == "cpu" else [torch.device("cpu"), device]
    for size in 64, 256, 1024:
        a = torch.randn(size, size)
        line = f"{size} x {size} matmul"
        for where in devices:
            moved = a.to(where)
            line += f" | {where} {milliseconds(where, torch.mm, moved, moved):.3f} ms"
        print(line)


def copy_to_device(device):
    """Pinned CPU memory is never swapped to disk. Only copies from it can be fully asynchronous."""
    if device.type != "cuda":
        print(f"pinned memory speeds up copies to CUDA devices: nothing to show on {device}")
        return
    pageable = torch.ones(64, 2**20)  # normal CPU memory
    pinned = pageable.pin_memory()
    for name, source in ("pageable", pageable), ("pinned", pinned):  # times source.to(device)
        print(f"256 MiB to {device} | {name} {milliseconds(device, source.to, device):.2f} ms")
    start = time.perf_counter()
    copy = pinned.to(device, non_blocking=True)
    returned = 1000 * (time.perf_counter() - start)
    # The GPU works in order, so the copy is complete when .item() returns. Do not change `pinned`
    # until then. Batches of a DataLoader are safe: PyTorch reuses their memory only after the copy.
    total = copy.sum().item()
    print(f"pinned, non_blocking | returned after {returned:.3f} ms | sum {total:.0f}")


def train_on(device, images, targets):
    """Time a training step. Changes 1 and 2 bring training to a device, change 3 is for speed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))
    model.to(device)  # 1. Move the model before you create its optimizer.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []

    def step():
        inputs, labels = images.to(device), targets.to(device)  # 2. Move every batch.
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # without the autograd graph, which would keep memory

    duration = milliseconds(device, step)  # 11 steps, 10 of them timed
    loss = losses[-1].item()  # 3. Call .item() after all steps, not in each: it waits for the GPU.
    print(f"{len(losses)} steps on {device} | loss {loss:.4f} | {duration:.1f} ms per step")
    return duration


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data-dir", default=Path(__file__).resolve().with_name("data"), help="folder for MNIST")
    add("--device", choices=["cuda", "cpu", "mps"], default=device, help="default: cuda, else cpu")
    args = parser.parse_args()
    device = torch.device(args.device)

    show_devices()
    move_tensors(device)
    mix_devices(device)
    time_work(device)
    copy_to_device(device)

    mnist = MNIST(args.data_dir, train=True, download=True)
    images = (mnist.data[:1000].unsqueeze(1) / 255 - 0.1307) / 0.3081  # mean and std
    cpu_time = train_on(torch.device("cpu"), images, mnist.targets[:1000])
    if device.type != "cpu":
        device_time = train_on(device, images, mnist.targets[:1000])
        print(f"a step on {device} is {cpu_time / device_time:.1f} times as fast as on the CPU")


if __name__ == "__main__":
    main()
