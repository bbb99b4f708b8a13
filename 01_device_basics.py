"""What a device is: choose one, move tensors and models to it, and time the work done there.

    python 01_device_basics.py
    python 01_device_basics.py --device cpu

Read it from top to bottom; each part prints what it shows. Whether a GPU helps depends on the size
of the work: it is slower than a CPU at small things, and copies to it cost time.
"""

# SPDX-License-Identifier: 0BSD
# /// script
# requires-python = ">=3.9"
# dependencies = ["torch>=2.4.0", "torchvision>=0.19.0"]
# ///

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision import datasets


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


def show_devices():
    """Which devices this machine has, and what they can do."""
    print(
        f"torch {torch.__version__} | built for CUDA {torch.version.cuda}"
        f" | {torch.get_num_threads()} CPU threads"
    )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        print(
            f"cuda:{index} | {gpu.name} | {gpu.total_memory / 2**30:.0f} GiB"
            f" | capability {gpu.major}.{gpu.minor} | bfloat16 in hardware: {gpu.major >= 8}"
        )
    print(f"mps | available: {torch.backends.mps.is_available()}")


def move_tensors(device):
    """Tensors stay where they are made; .to() copies them, unless they are there already."""
    here = torch.arange(3.0)
    there = here.to(device)
    made = torch.zeros(3, device=device)  # no copy: better than torch.zeros(3).to(device)
    there += 1
    print(f"made on {here.device}, copied to {there.device}, made on {made.device}")
    print(
        f"changing the copy changes the original: {here[0].item() == 1} (only if .to() had no work)"
    )

    # A model moves in place, so that .to() needs no assignment; a tensor's .to() does.
    model = nn.Linear(3, 2)
    model.to(device)
    print(f"the model is on {model.weight.device}")

    # NumPy knows neither devices nor gradients: take both off first.
    output = model(made).detach().cpu().numpy()
    print(f"as NumPy: {type(output).__name__} of shape {output.shape}")


def mix_devices(device):
    """The commonest error: two devices in one operation (for a CPU, "meta" plays the other)."""
    other = torch.device("meta" if device.type == "cpu" else "cpu")
    model = nn.Linear(3, 2, device=device)
    inputs = torch.ones(1, 3, device=other)
    try:
        model(inputs)
    except RuntimeError as error:
        print(f"RuntimeError: {error}")
    inputs = torch.ones(1, 3, device=model.weight.device)
    print(f"mended: inputs made on {inputs.device}, result of shape {tuple(model(inputs).shape)}")


def synchronize(device):
    """Wait until the device has done what was asked of it; a CPU has when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def milliseconds(device, work, *args):
    """Median time of work(*args), warmed up, each from an idle device to an idle device."""
    work(*args)
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
    a @ a  # the first call also starts libraries: never time it
    synchronize(device)
    start = time.perf_counter()
    a @ a
    launched = 1000 * (time.perf_counter() - start)
    synchronize(device)
    done = 1000 * (time.perf_counter() - start)
    print(f"1024 x 1024 product | wrong clock {launched:.3f} ms | with synchronize {done:.3f} ms")

    for size in 64, 256, 1024:
        on_cpu = torch.randn(size, size)
        on_device = on_cpu.to(device)
        cpu_time = milliseconds(torch.device("cpu"), torch.mm, on_cpu, on_cpu)
        device_time = milliseconds(device, torch.mm, on_device, on_device)
        print(f"{size} x {size} product | cpu {cpu_time:.3f} ms | {device} {device_time:.3f} ms")


def copy_to_device(device):
    """Only from pinned memory can a copy run while Python, and the GPU, do something else."""
    if device.type != "cuda":
        print(f"pinned memory speeds up copies to CUDA GPUs only: nothing to show on {device}")
        return
    pageable = torch.ones(64, 2**20)
    pinned = pageable.pin_memory()
    for name, source in ("pageable", pageable), ("pinned", pinned):
        print(f"256 MiB to {device} | {name} {milliseconds(device, source.to, device):.2f} ms")
    start = time.perf_counter()
    copy = pinned.to(device, non_blocking=True)
    launched = 1000 * (time.perf_counter() - start)
    total = copy.sum().item()  # safe: the device works in order; reading `pinned` anew would not be
    print(f"pinned, non_blocking | returned after {launched:.3f} ms | sum {total:.0f}")


def train_on_device(device, data_dir):
    """The three changes that put training on a device."""
    inputs, targets = load_data(data_dir, train=True, limit=1000).tensors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(device)  # 1. the model, before the optimizer is made
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(20):
        inputs, targets = inputs.to(device), targets.to(device)  # 2. every batch
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after 20 steps on {device}: {loss.item():.4f}")  # 3. numbers come back last


def main():
    device = "mps" if torch.backends.mps.is_available() else "cpu"
    device = "cuda" if torch.cuda.is_available() else device
    data_dir = Path(__file__).resolve().with_name("data")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=data_dir, help="holds MNIST/raw")
    parser.add_argument("--device", type=torch.device, default=device, help="cuda:1, mps, cpu, ...")
    args = parser.parse_args()

    show_devices()
    move_tensors(args.device)
    mix_devices(args.device)
    time_work(args.device)
    copy_to_device(args.device)
    train_on_device(args.device, args.data_dir)


if __name__ == "__main__":
    main()
