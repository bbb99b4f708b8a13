"""03 to 09 are 02 plus one technique and nothing else.

Below their docstrings, they may differ from 02 only as written in DIFFERENCES. A fix made in 02 and
missed in a copy, a stray line, a moved statement or a renamed variable is reported with its script
and line. After a change that is meant, `python tests/test_family.py` prints the new table: read it,
then paste it.
"""

import ast
import difflib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = "02_train_gpu.py"
TECHNIQUES = sorted(path.name for path in ROOT.glob("0[3-9]_*.py"))
VERBATIM = [
    "positive_int",
    "output_path",
    "InMemory",
    "load_data",
    "build_model",
    "evaluate",
    "save",
]


def code(script):
    """Pairs (line number, line) of a script below its docstring, empty lines left out."""
    text = (ROOT / script).read_text(encoding="utf-8")
    start = ast.parse(text).body[0].end_lineno
    lines = enumerate(text.splitlines()[start:], start + 1)
    return [(number, line) for number, line in lines if line]


def differences(script):
    """[(where, line of 02 before the place, lines of 02 replaced, lines in their stead), ...]"""
    base, copy = code(BASE), code(script)
    matcher = difflib.SequenceMatcher(
        None, [line for _, line in base], [line for _, line in copy], autojunk=False
    )
    return [
        (
            f"{script}:{copy[min(k, len(copy) - 1)][0]}",
            base[i - 1][1].strip(),
            [line for _, line in base[i:j]],
            [line for _, line in copy[k:l]],
        )
        for tag, i, j, k, l in matcher.get_opcodes()
        if tag != "equal"
    ]


def definitions(script):
    """Source text of the top-level functions and classes of a script, by name."""
    text = (ROOT / script).read_text(encoding="utf-8")
    return {
        node.name: "\n".join(
            text.splitlines()[(node.decorator_list or [node])[0].lineno - 1 : node.end_lineno]
        )
        for node in ast.parse(text).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


DIFFERENCES = {
    "03_memory.py": [
        ("from torch.optim.lr_scheduler import OneCycleLR", [], 1),
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        (")", ["def train(model, loader, optimizer, scheduler, device):"], 1),
        ("targets = targets.to(device, non_blocking=True)", ["        logits = model(inputs)"], 1),
        ('os.replace(Path(folder, "new"), path)', [], 36),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
        (
            'print(f"{result} | {speed:,.0f} images/s | gpu memory {memory:.0f} MiB", flush=True)',
            [],
            2,
        ),
    ],
    "04_grad_accum.py": [
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        (")", ["def train(model, loader, optimizer, scheduler, device):"], 1),
        (
            "total_loss = torch.zeros((), device=device)",
            [
                "    for inputs, targets in loader:",
                "        inputs = inputs.to(device, non_blocking=True)",
                "        targets = targets.to(device, non_blocking=True)",
                "        logits = model(inputs)",
                "        loss = cross_entropy(logits, targets)",
                "        total_loss += loss.detach()  # .item() would wait for the device at every step",
                "        loss.backward()",
            ],
            9,
        ),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
    ],
    "05_amp.py": [
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        (")", ["def train(model, loader, optimizer, scheduler, device):"], 1),
        (
            "targets = targets.to(device, non_blocking=True)",
            ["        logits = model(inputs)", "        loss = cross_entropy(logits, targets)"],
            3,
        ),
        (
            "total_loss += loss.detach()  # .item() would wait for the device at every step",
            ["        loss.backward()"],
            3,
        ),
        (
            "nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",
            ["        optimizer.step()", "        scheduler.step()"],
            4,
        ),
        ("scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, **shape)", [], 5),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
    ],
    "06_dataparallel.py": [
        ("model = build_model(args.width).to(device, memory_format=torch.channels_last)", [], 3),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
    ],
    "07_ddp.py": [
        ("import torch", [], 1),
        ("from torch.nn.functional import cross_entropy", [], 1),
        ("from torch.utils.data import DataLoader, TensorDataset", [], 1),
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        ("optimizer.zero_grad()", ["    return total_loss.item() / len(loader)"], 2),
        ('os.replace(Path(folder, "new"), path)', [], 18),
        ("device = args.device", [], 15),
        ("torch.manual_seed(args.seed)", [], 5),
        ("test_set = load_data(args.data_dir, train=False, limit=args.limit)", [], 2),
        (
            "}",
            [
                "    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **options)",
                "    test_loader = DataLoader(test_set, args.batch_size, **options)",
            ],
            6,
        ),
        ("model = build_model(args.width).to(device, memory_format=torch.channels_last)", [], 1),
        ("scheduler = OneCycleLR(optimizer, args.lr, total_steps=total_steps, **shape)", [], 4),
        (
            'header = f"{device} | torch {torch.__version__} | {len(train_set):,} images"',
            [
                '    print(f"{header} | batch {args.batch_size} | width {args.width}", flush=True)',
                "    for epoch in range(1, args.epochs + 1):",
            ],
            6,
        ),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
        (
            "speed = steps * args.batch_size / (time.perf_counter() - start)",
            ["        accuracy = evaluate(model, test_loader, device) / len(test_set)"],
            3,
        ),
        (
            'result = f"epoch {epoch}/{args.epochs} | loss {loss:.4f} | accuracy {accuracy:.2%}"',
            [
                '        print(f"{result} | {speed:,.0f} images/s | gpu memory {memory:.0f} MiB", flush=True)',
                "    if args.save:",
            ],
            6,
        ),
        ("save(model.state_dict(), args.save)", [], 1),
    ],
    "08_compile.py": [
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        ("model = build_model(args.width).to(device, memory_format=torch.channels_last)", [], 1),
        ('print(f"{header} | batch {args.batch_size} | width {args.width}", flush=True)', [], 12),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
    ],
    "09_profile.py": [
        ("from torch.optim.lr_scheduler import OneCycleLR", [], 1),
        (
            'parser.add_argument("--save", type=output_path, help="file for the trained weights")',
            [],
            1,
        ),
        (")", ["def train(model, loader, optimizer, scheduler, device):"], 1),
        (
            "total_loss = torch.zeros((), device=device)",
            [
                "    for inputs, targets in loader:",
                "        inputs = inputs.to(device, non_blocking=True)",
                "        targets = targets.to(device, non_blocking=True)",
                "        logits = model(inputs)",
                "        loss = cross_entropy(logits, targets)",
            ],
            9,
        ),
        (
            "total_loss += loss.detach()  # .item() would wait for the device at every step",
            [
                "        loss.backward()",
                "        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)",
                "        optimizer.step()",
                "        scheduler.step()",
                "        optimizer.zero_grad()",
            ],
            8,
        ),
        ('sys.exit("too few images for one batch: lower --batch-size or raise --limit")', [], 2),
        ('print(f"{header} | batch {args.batch_size} | width {args.width}", flush=True)', [], 6),
        (
            "start = time.perf_counter()",
            ["        loss = train(model, train_loader, optimizer, scheduler, device)"],
            1,
        ),
        ("save(model.state_dict(), args.save)", [], 5),
    ],
}

GONE = {
    "03_memory.py": {
        "def train(model, loader, optimizer, scheduler, device):",
        "loss = train(model, train_loader, optimizer, scheduler, device)",
    },
    "04_grad_accum.py": {
        "def train(model, loader, optimizer, scheduler, device):",
        "loss = cross_entropy(logits, targets)",
        "loss = train(model, train_loader, optimizer, scheduler, device)",
    },
    "05_amp.py": {
        "def train(model, loader, optimizer, scheduler, device):",
        "loss = train(model, train_loader, optimizer, scheduler, device)",
        "loss.backward()",
        "optimizer.step()",
    },
    "06_dataparallel.py": {"loss = train(model, train_loader, optimizer, scheduler, device)"},
    "07_ddp.py": {
        "accuracy = evaluate(model, test_loader, device) / len(test_set)",
        "for epoch in range(1, args.epochs + 1):",
        "if args.save:",
        "loss = train(model, train_loader, optimizer, scheduler, device)",
        "return total_loss.item() / len(loader)",
        "test_loader = DataLoader(test_set, args.batch_size, **options)",
        "train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **options)",
    },
    "08_compile.py": {"loss = train(model, train_loader, optimizer, scheduler, device)"},
    "09_profile.py": {
        "def train(model, loader, optimizer, scheduler, device):",
        "loss = train(model, train_loader, optimizer, scheduler, device)",
    },
}


def test_every_technique_has_an_entry():
    assert TECHNIQUES == sorted(DIFFERENCES)


@pytest.mark.parametrize("script", TECHNIQUES)
def test_differs_from_02_only_by_its_technique(script):
    found, expected = differences(script), list(DIFFERENCES[script])
    for where, after, replaced, added in found:
        entry = (after, replaced, len(added))
        assert entry in expected, (
            f"{where}: after `{after}` this script has {added} where {BASE} has {replaced}; "
            "it is not in DIFFERENCES"
        )
        expected.remove(entry)
    assert not expected, f"{script}: a difference from {BASE} is gone: {expected}"


@pytest.mark.parametrize("script", TECHNIQUES)
def test_lines_of_02_that_are_gone(script):
    """Indentation aside, so that a line inside a block that is indented anew is held to 02's too."""
    copy = [line.strip() for _, line in code(script)]
    gone = {line.strip() for _, line in code(BASE)} - {*copy}
    assert gone == GONE[script], f"{script}: it lacks lines of {BASE}, or has them again"


@pytest.mark.parametrize("script", TECHNIQUES)
@pytest.mark.parametrize("name", VERBATIM)
def test_verbatim(script, name):
    assert definitions(script)[name] == definitions(BASE)[name], f"{script}: {name} is not {BASE}'s"


@pytest.mark.parametrize("name", ["InMemory", "load_data"])
def test_01_loads_data_as_02_does(name):
    assert definitions("01_device_basics.py")[name] == definitions(BASE)[name]


@pytest.mark.parametrize("script", ["01_device_basics.py", *TECHNIQUES])
def test_same_metadata(script):
    def metadata(name):
        text = (ROOT / name).read_text(encoding="utf-8")
        return text[text.index("# SPDX") : text.index("import argparse")]

    assert metadata(script) == metadata(BASE)


@pytest.mark.parametrize("script", ["01_device_basics.py", BASE, *TECHNIQUES])
def test_imports_only_the_standard_library_and_torch(script):
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names}
    assert roots <= sys.stdlib_module_names | {"torch", "torchvision"}


if __name__ == "__main__":
    print("DIFFERENCES = {")
    for script in TECHNIQUES:
        print(f'    "{script}": [')
        for _, after, replaced, added in differences(script):
            print(f"        ({after!r}, {replaced!r}, {len(added)}),")
        print("    ],")
    print("}\n\nGONE = {")
    for script in TECHNIQUES:
        gone = {line.strip() for _, line in code(BASE)} - {line.strip() for _, line in code(script)}
        print(f"    {script!r}: {{{', '.join(map(repr, sorted(gone)))}}},")
    print("}")
