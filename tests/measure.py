"""Measure all scripts on this machine and print the tables of README.md, in Markdown.

    python tests/measure.py                          # a few minutes: on the GPU, else on the CPU
    python tests/measure.py --rounds 1 --limit 2000  # a short check

Every script runs as a user would run it, in a process of its own. The rounds alternate between the
scripts, so that a machine that becomes slower in between slows down all of them. What is running is
said on standard error. A script that fails gets a row with its last line, and the exit status is 1.

If the GPU works in less than 80 % of a step of 02, the model is too small for it, and 05 and 08 can
show little. Then 02, 05 and 08 are also measured at twice and four times the width.
"""

import argparse
import datetime
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(<summary>(0\d(?: \+ (?:0\d|early stopping))*)\b[^\n]*</summary>\n\n"
    r"(?:(?!```)[^\n]+\n\n)?```diff\n)(.*?)(?=```)",
    re.DOTALL,
)
BLOCKS = {
    name: text for _, name, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
}
LAST = re.compile(
    r"epoch (\d+)/\1 \| loss .* \| accuracy (.*)% \| ([\d,]+) images/s(?: \| peak memory (\d+) MiB)?"
)
KERNELS = re.compile(r"ProfilerStep\* +\| CPU +[\d.]+ ms \| GPU +([\d.]+) ms per step")  # of 09


def patched(name, folder):
    """Apply the README's patch of that name to a copy of its script; return the copy's path."""
    script = re.match(r"--- a/(\S+)\n", BLOCKS[name])[1]
    copy = Path(folder, f"{name.replace(' + ', '_')}.py")
    command = ["git", "apply", "--verbose", "-"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        shutil.copy(ROOT / script, place)
        done = subprocess.run(
            command, cwd=place, input=BLOCKS[name], text=True, capture_output=True, check=False
        )
        if done.returncode != 0 or "offset" in done.stderr:
            raise RuntimeError(f"the patch {name} does not fit {script}: {done.stderr}")
        shutil.move(Path(place, script), copy)
    return copy


def measurements(device, folder):
    """What to run: {name: (script, its own flags, number of processes, or 0 without torchrun)}."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    processes = gpus or min(2, os.cpu_count())
    shared = f"{processes} processes, one per {'GPU' if gpus else 'core'}"
    runs = {"02, training loop": ("02_train_gpu.py", [], 0)}
    runs["03, activation checkpointing"] = ("03_memory.py", [], 0)
    runs["04, gradient accumulation"] = ("04_grad_accum.py", [], 0)
    for dtype in ["bfloat16", "float16"] if gpus else ["bfloat16"]:
        runs[f"05, {dtype}"] = ("05_amp.py", ["--dtype", dtype], 0)
    if gpus > 1:
        runs[f"06, DataParallel, {gpus} GPUs"] = ("06_dataparallel.py", [], 0)
    runs["07, DDP, 1 process"] = ("07_ddp.py", [], 1)
    if processes > 1:
        runs[f"07, DDP, {shared}"] = ("07_ddp.py", [], processes)
    for mode in ["default", "reduce-overhead", "max-autotune"] if gpus else ["default"]:
        runs[f"08, torch.compile, {mode}"] = ("08_compile.py", ["--mode", mode], 0)
    runs["09, profiler"] = ("09_profile.py", ["--trace", f"{folder}/trace.json"], 0)
    runs["05 + 08"] = (patched("05 + 08", folder), [], 0)
    if processes > 1:
        runs[f"07 + 05, {shared}"] = (patched("07 + 05", folder), [], processes)
    return runs


def run(script, flags, processes, folder):
    """Return a list, or what went wrong as a string.

    The list: images/s in the last epoch, the accuracy in %, MiB (0 on a CPU), and the milliseconds of
    GPU kernels per step (0 for all but 09).
    """
    command = [sys.executable, str(ROOT / script), *flags, "--data-dir", str(ROOT / "data")]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
    if processes:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command[1:1] = launcher
        env["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    last = LAST.search(done.stdout)
    if done.returncode == 0 and last:
        kernels = KERNELS.search(done.stdout)
        speed, memory = int(last[3].replace(",", "")), int(last[4] or 0)
        return [speed, float(last[2]), memory, float(kernels[1]) if kernels else 0.0]
    lines = (done.stdout + done.stderr).splitlines() or ["no output"]
    return [line for line in lines if "Error" in line or line == lines[-1]][-1].replace("|", "/")


def table(results, gpu):
    """The results in Markdown: each round's throughput and memory beside those of 02 in it."""
    head = ["", "images/s", "to 02 (lowest, highest)", "accuracy"]
    head += ["peak memory", "to 02"] if gpu else []
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    base = next(iter(results.values()))
    for name, rounds in results.items():
        failed = [found for found in rounds if isinstance(found, str)]
        pairs = [(a, b) for a, b in zip(rounds, base) if not isinstance(b, str)]
        if failed or not pairs:
            cells = [*failed[-1:], *[""] * (len(head) - 1)][: len(head) - 1]
        else:
            ratios = [a[0] / b[0] for a, b in pairs]
            cells = [
                f"{statistics.median(found[0] for found in rounds):,.0f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})",
                f"{statistics.median(found[1] for found in rounds):.2f} %",
            ]
            if gpu:
                size, base_size = (max(each[k][2] for each in pairs) for k in (0, 1))
                cells += [f"{size:,} MiB", f"{size / base_size:.2f}"]
        yield f"| {' | '.join([name, *cells])} |"


def share_of_the_gpu(results, batch_size=480):
    """Return in which share of a step of 02 the GPU works, or None if that was not measured.

    The kernels are those that 09 has recorded, and the time of a step is that of 02, since the
    profiler makes a step slower, but not its kernels.
    """
    base, profiled = (
        [found for found in results.get(name, []) if not isinstance(found, str)]
        for name in ("02, training loop", "09, profiler")
    )
    if not base or not profiled or not profiled[0][3]:
        return None
    step = 1000 * batch_size / statistics.median(found[0] for found in base)
    return statistics.median(found[3] for found in profiled) / step


def wider(todo, width):
    """What to run at this width: 02, and 05 and 08 with their dtypes and modes, as in `todo`."""
    names = [name for name in todo if re.match(r"0[258], ", name)]
    return {
        f"{name}, width {width}": (todo[name][0], [*todo[name][1], "--width", str(width)], 0)
        for name in names
    }


def machine(device):
    """GPUs or processor, versions and date, in one line."""
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        name = f"{torch.cuda.device_count()} × {gpu.name} (capability {gpu.major}.{gpu.minor})"
    else:
        info = Path("/proc/cpuinfo")
        info = info.read_text(encoding="utf-8") if info.exists() else ""
        model = re.search(r"model name\s*: (.*)", info)
        units = [unit for unit in ("avx512_bf16", "amx_bf16") if unit in info]
        name = f"{os.cpu_count()} cores of {model[1] if model else platform.processor()}"
        name += f" ({' and '.join(units) or 'no hardware support for bfloat16'})"
    return f"{name}, torch {torch.__version__}, {datetime.date.today()}"


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="runs of each script (default: %(default)s)")
    add("--device", choices=["cuda", "cpu"], default=device, help="default: cuda, else cpu")
    add("--limit", type=int, help="images of each set (default: all on CUDA, otherwise 9600)")
    add("--width", type=int, help="as for the scripts")
    add("--wider", action="store_true", help="also twice and four times the width, on any device")
    args = parser.parse_args()
    limit = args.limit or (60000 if args.device == "cuda" else 9600)
    flags = ["--device", args.device, "--limit", str(limit)]
    flags += ["--width", str(args.width)] if args.width else []
    folder = tempfile.mkdtemp()
    todo, results, sizes, status = measurements(args.device, folder), {}, [], 0

    def measure(todo, results):
        for number in range(1, args.rounds + 1):
            for name, (script, own, processes) in todo.items():
                print(f"round {number}/{args.rounds} | {name}", file=sys.stderr, flush=True)
                results.setdefault(name, []).append(run(script, flags + own, processes, folder))

    try:
        measure(todo, results)
        share = share_of_the_gpu(results)
        if args.wider or (share is not None and share < 0.8):
            width = args.width or (256 if args.device == "cuda" else 8)
            for factor in 2, 4:
                sizes.append({})
                measure(wider(todo, factor * width), sizes[-1])
    except KeyboardInterrupt:
        status = 130
    shutil.rmtree(folder, ignore_errors=True)
    command = " ".join(["python tests/measure.py", *sys.argv[1:]])
    print(f"{machine(args.device)}: `{command}`")
    single = {name: rounds for name, rounds in results.items() if " + " not in name}
    stacked = {name: results[name] for name in results if name[:2] in ("02", "05") or "+" in name}
    for rows in filter(None, (single, stacked, *sizes)):
        print("", *table(rows, args.device == "cuda"), sep="\n")
    share = share_of_the_gpu(results)
    if share is not None:
        print(f"\nThe GPU works in {share:.0%} of a step of 02.")
    every = [found for rows in (results, *sizes) for rounds in rows.values() for found in rounds]
    failed = any(isinstance(found, str) for found in every)
    sys.exit(status or failed)


if __name__ == "__main__":
    main()
