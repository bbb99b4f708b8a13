"""What a device is: choose one, move tensors and models to it, and time the work done there.

    python 01_device_basics.py
    python 01_device_basics.py --device cpu

Read it from top to bottom; each part prints what it shows. A GPU pays where the work is large: each
call has a cost whatever its size, and so has each copy. The timings compare it with the CPU.
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
from torch.nn.functional import cross_entropy
from torchvision import datasets


def show_devices():
    """Which devices this machine has. torch calls AMD's GPUs cuda, too: they are built for HIP."""
    built = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    print(f"torch {torch.__version__} | {built} | {torch.get_num_threads()} CPU threads")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        size = f"{gpu.total_memory / 2**30:.0f} GiB"
        print(f"cuda:{index} | {gpu.name} | {size} | capability {gpu.major}.{gpu.minor}")
    print(f"mps | available: {torch.backends.mps.is_available()}")


def move_tensors(device):
    """A tensor stays where it was made: .to() returns a copy, or itself if it is there already."""
    here = torch.arange(3.0)
    there = here.to(device)
    made = torch.zeros(3, device=device)  # no copy: better than torch.zeros(3).to(device)
    print(f"made on {here.device}, copied to {there.device}, made on {made.device}")
    print(f"the copy is the original: {there is here} (True only where nothing had to move)")

    # A model moves in place, so that .to() needs no assignment; a tensor's .to() does.
    model = nn.Linear(3, 2)
    model.to(device)
    print(f"the model is on {model.weight.device}")

    # NumPy knows neither devices nor gradients: take both off first.
    output = model(made).detach().cpu().numpy()
    print(f"as NumPy: {type(output).__name__} of shape {output.shape}")


def mix_devices(device):
    """The commonest error, on a GPU: Expected all tensors to be on the same device, but ..."""
    other = torch.device("meta" if device.type == "cpu" else "cpu")  # meta plays a second device
    model = nn.Linear(3, 2, device=device)
    try:
        model(torch.ones(1, 3, device=other))
    except RuntimeError as error:
        print(f"RuntimeError: {error}")
    inputs = torch.ones(1, 3, device=model.weight.device)
    print(f"mended: inputs made on {inputs.device}, result of shape {tuple(model(inputs).shape)}")


def synchronize(device):
    """Wait until the device has done what was asked of it; a CPU has when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def milliseconds(device, work, *args):
    """Median time of work(*args), warmed up, each from an idle device to an idle device."""
    work(*args)  # the first call also starts libraries: never time it
    times = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        work(*args)
        synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def time_work(device):
    """A GPU call returns when the work is queued, not when it is done."""
    a = torch.randn(1024, 1024, device=device)
    right = milliseconds(device, torch.mm, a, a)
    start = time.perf_counter()
    torch.mm(a, a)
    wrong = 1000 * (time.perf_counter() - start)
    print(f"1024 x 1024 product | with synchronize {right:.3f} ms | without {wrong:.3f} ms")
    for size in 64, 256, 1024:
        on_cpu = torch.randn(size, size)
        on_device = on_cpu.to(device)
        cpu_time = milliseconds(torch.device("cpu"), torch.mm, on_cpu, on_cpu)
        device_time = milliseconds(device, torch.mm, on_device, on_device)
        print(f"{size} x {size} product | cpu {cpu_time:.3f} ms | {device} {device_time:.3f} ms")


def copy_to_device(device):
    """Only from pinned memory can a copy run while Python, and the GPU, do something else."""
    if device.type != "cuda":
        print(f"pinned memory is for copies to CUDA devices: nothing to show on {device}")
        return
    pageable = torch.ones(64, 2**20)
    pinned = pageable.pin_memory()
    for name, source in ("pageable", pageable), ("pinned", pinned):
        print(f"256 MiB to {device} | {name} {milliseconds(device, source.to, device):.2f} ms")
    start = time.perf_counter()
    copy = pinned.to(device, non_blocking=True)
    launched = 1000 * (time.perf_counter() - start)
    total = copy.sum().item()  # safe: the device works in order; writing to `pinned` would not be
    print(f"pinned, non_blocking | returned after {launched:.3f} ms | sum {total:.0f}")


def train_on(device, images, targets):
    """One training step, timed: the three changes that put training on a device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 10))
    model.to(device)  # 1. the model, before the optimizer is made
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []

    def step():
        inputs, labels = images.to(device), targets.to(device)  # 2. every batch
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    duration = milliseconds(device, step)
    loss = losses[-1].item()  # 3. numbers come back last
    print(f"{len(losses)} steps on {device} | loss {loss:.4f} | {duration:.1f} ms a step")
    return duration


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_dir = Path(__file__).resolve().with_name("data")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=data_dir, help="holds MNIST/raw, or will")
    parser.add_argument("--device", choices=["cuda", "cpu", "mps"], default=device)
    args = parser.parse_args()
    device = torch.device(args.device)

    show_devices()
    move_tensors(device)
    mix_devices(device)
    time_work(device)
    copy_to_device(device)

    mnist = datasets.MNIST(args.data_dir, train=True, download=True)
    images = mnist.data[:1000, None].float().div_(255).sub_(0.1307).div_(0.3081)
    cpu_time = train_on(torch.device("cpu"), images, mnist.targets[:1000])
    if device.type != "cpu":
        device_time = train_on(device, images, mnist.targets[:1000])
        print(f"a step on {device} is {cpu_time / device_time:.1f} times as fast as on the CPU")


if __name__ == "__main__":
    main()
