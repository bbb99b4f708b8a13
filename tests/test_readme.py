"""The README shows what is so: the scripts' differences, patches, names, flags, commands.

python tests/test_readme.py    writes the differences and patches into README.md anew
"""

import difflib
import re
import shutil
import subprocess
import sys

import measure
import pytest
import torch
from conftest import EPOCH, FAMILY, HEADER, ROOT, free_port, load, results, run
from measure import BLOCK, BLOCKS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "slurm/README.md", "tests/README.md"]
QUICK = ["--device", "cpu", "--limit", "800", "--batch-size", "48", "--epochs", "2", "--width", "4"]


def code(script):
    """A script's lines behind its docstring."""
    text = (ROOT / script).read_text(encoding="utf-8")
    return text[text.index("# SPDX") :].splitlines()


def differences(script):
    """What a script takes from 02 and adds to it, as a diff that passes over indentation.

    Every piece is headed by the function it stands in, or "imports"; before a pure addition stands
    the line that it follows.
    The last line counts the lines of 02 that only moved to the right or to the left, one by one.
    """
    base, copy = code("02_train_gpu.py"), code(script)
    stripped = [[line.strip() for line in lines] for lines in (base, copy)]
    result, moved = [], {}
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(
        None, *stripped, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            for old, new in zip(base[i1:i2], copy[j1:j2]):
                moved[len(new) - len(old)] = moved.get(len(new) - len(old), 0) + 1
            continue
        heads = [line for line in copy[: j1 + 1] if line.startswith(("def ", "class "))]
        result.append(f"@@ {heads[-1].split('(')[0] if heads else 'imports'} @@")
        result += [f" {line}" for line in copy[j1 - 1 : j1] if line and i1 == i2]
        result += [f"-{line}" for line in base[i1:i2]] + [f"+{line}" for line in copy[j1:j2]]
    for columns in sorted(moved.keys() - {0}):
        result.append(f"@@ {moved[columns]} lines indented by {columns} more @@")
    return "".join(f"{line}\n" for line in result)


def patch(name, folder):
    """Apply the patch of that name; return the path of the result and the script it is for."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    return measure.patched(name, folder), re.match(r"--- a/(\S+)\n", BLOCKS[name])[1]


@pytest.mark.parametrize("script", FAMILY[1:])
def test_difference_to_02_is_shown(script):
    """A fix of 02 that a copy lacks, a changed constant, a renamed variable: all show here."""
    shown = BLOCKS[script[:2]].splitlines()
    changes = "\n".join(difflib.unified_diff(shown, differences(script).splitlines(), lineterm=""))
    assert not changes, (
        f"{script}: README shows (-), the script has (+); write: python {__file__}\n{changes}"
    )


@pytest.mark.parametrize("script", FAMILY[1:])
def test_docstring_says_how_to_see_the_difference(script):
    text = (ROOT / script).read_text(encoding="utf-8")
    assert (
        f"    git diff --no-index -w 02_train_gpu.py {script}  # what it adds to 02\n"
        in text.split('"""')[1]
    )


@pytest.fixture
def trained(monkeypatch, capsys, tmp_path):
    """trained(path, flags): train in this process, alone in its group; the last loss and accuracy."""

    def trained(path, *flags, done=False):
        monkeypatch.setattr(sys, "argv", [str(path), *QUICK, *flags])
        try:
            load(path).main()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        lines = capsys.readouterr().out.splitlines()
        if done:
            return lines.index(
                "resumed | 2/2 epochs were done: nothing is left to train or to save"
            )
        last = [EPOCH.fullmatch(line) for line in lines if line.startswith("epoch")][-1]
        return float(last[3]), float(last[4])

    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**places, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return trained


@pytest.mark.parametrize("name", ["07 + 08", "05 + 08"])
def test_patched_to_compile(name, trained, monkeypatch, tmp_path):
    """The whole model is one graph, with the result of the script that does not compile."""
    graphs, compile = [], torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=count))
    path, plain = patch(name, tmp_path)
    data = "--data-dir", str(ROOT / "data")
    loss, _ = trained(path, *data)
    assert len(graphs) == 1
    assert loss == pytest.approx(trained(plain, *data)[0], abs=2e-3)


@pytest.mark.parametrize("name", ["07 + 04", "07 + 05 + 04"])
def test_patched_to_accumulate(name, trained, monkeypatch, tmp_path):
    """One all-reduce of the gradients per batch, not one per micro-batch; the loss of 07."""
    reductions, wrap = [], torch.nn.parallel.DistributedDataParallel

    def count(state, bucket):
        reductions.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def counted(model):
        ddp_model = wrap(model)
        ddp_model.register_comm_hook(None, count)
        return ddp_model

    path, plain = patch(name, tmp_path)
    data = "--data-dir", str(ROOT / "data")
    expected, _ = trained(plain, *data)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", counted)
    loss, _ = trained(path, *data, "--accum", "4")
    assert loss == pytest.approx(expected, abs=0.05 if "05" in name else 2e-3)
    assert len(reductions) == 2 * (800 // 48)


@pytest.mark.parametrize("name", ["07 + 05", "05 + 04", "07 + 05 + 04"])
def test_patched_to_mixed_precision(name, trained, imitated_gpu, monkeypatch, tmp_path):
    """Near the plain script; the scaler is called in order, once per update; old GPUs get float16."""
    calls, scaler = [], torch.amp.GradScaler
    for method in "unscale_", "step", "update":
        real = getattr(scaler, method)

        def call(self, *args, method=method, real=real):
            calls.append(method)
            return real(self, *args)

        monkeypatch.setattr(scaler, method, call)
    path, plain = patch(name, tmp_path)
    data = "--data-dir", str(ROOT / "data")
    expected = trained(plain, *data)
    calls.clear()
    flags = ["--checkpoint", "run.pt"] if "07" in name else []
    found = trained(path, *data, *flags)
    assert calls == ["unscale_", "step", "update"] * (2 * (800 // 48))
    assert found[0] == pytest.approx(expected[0], abs=0.05)
    assert found[1] == pytest.approx(expected[1], abs=4)
    if "07" in name:
        state = torch.load("run.pt", weights_only=True)
        assert "scaler" in state and state["flags"]["dtype"] == "torch.bfloat16"
        trained(path, *data, *flags, "--epochs", "2", done=True)
    else:
        module = load(path)

        def train(model, loader, optimizer, *rest):
            for _ in range(len(loader)):
                optimizer.step()
            return 1.0

        monkeypatch.setattr(module, "train", train)
        monkeypatch.setattr(sys, "argv", [str(path), *QUICK, *data, "--device", "cuda"])
        made = []
        monkeypatch.setattr(
            torch.amp, "GradScaler", lambda device, enabled: made.append(enabled) or scaler("cpu")
        )
        module.main()
        assert made == [True]


def test_patched_to_stop_early(monkeypatch, trained, tmp_path):
    """Epoch 2 is the best; a killed run resumes, waits on, stops, and stays stopped."""
    path, _ = patch("07 + early stopping", tmp_path)
    flags = [*QUICK, "--epochs", "9", "--patience", "3", "--data-dir", str(ROOT / "data")]
    flags += ["--save", "best.pt", "--checkpoint", "run.pt"]
    monkeypatch.setattr(sys, "argv", [str(path), *flags])
    evaluated, saved = [], {}

    def train(accuracies):
        module = load(path)
        save, accuracies = module.save, iter(accuracies)

        def record(state, file):
            saved.setdefault(file, []).append(len(evaluated))
            save(state, file)

        def evaluate(*args):
            evaluated.append(next(accuracies))
            return evaluated[-1]

        monkeypatch.setattr(module, "save", record)
        monkeypatch.setattr(module, "evaluate", evaluate)
        try:
            module.main()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    with pytest.raises(StopIteration):  # the kill
        train([0.5, 0.6, 0.6])
    train([0.55, 0.4])
    assert saved == {"best.pt": [1, 2], "run.pt": [1, 2, 3, 4, 5]}
    state = torch.load("run.pt", weights_only=True)
    assert (state["epoch"], state["best"], state["waited"]) == (5, 0.6, 3)
    train([])
    assert len(evaluated) == 5


def test_measure(monkeypatch, capsys, tmp_path):
    """The table holds what the scripts print; a script that fails has a row with its last line."""
    plan = measure.measurements("cpu", tmp_path)
    assert {name[:2] for name in plan} == {"02", "03", "04", "05", "07", "08", "09"}
    todo = {name: plan[name] for name in plan if name[:2] == "02" or "1 process" in name}
    todo["03"] = ("03_memory.py", ["--segments", "10"], 0)
    monkeypatch.setattr(measure, "measurements", lambda device, folder: todo)
    flags = ["--rounds", "1", "--limit", "960", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["measure.py", *flags])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"round 1/1 | {name}" for name in todo]
    rows = re.findall(r"^\| (0.+?) \| (.+?) \| (.*?) \| (.*?) \|$", out, re.MULTILINE)
    assert [row[0] for row in rows] == [*todo, "02, training loop"]  # two tables
    assert "invalid choice: 10" in rows[2][1]
    (_, _, accuracy), *_ = results(run("02_train_gpu.py", *flags[2:]))[1:]
    assert rows[0][2:] == ("1.00 (1.00, 1.00)", f"{accuracy:.2f} %")
    base, ddp = (int(row[1].replace(",", "")) for row in rows[:2])
    assert rows[1][2] == "{0:.2f} ({0:.2f}, {0:.2f})".format(ddp / base)


@pytest.mark.parametrize("kernels, share", [(2.4, 30), (7.9, 99), (0.0, None)])
def test_measure_finds_a_model_too_small_for_the_gpu(kernels, share, monkeypatch, capsys, tmp_path):
    """8 ms per step at 60,000 images/s; below 80 % of that in kernels, wider models follow."""

    def run(script, flags, processes, folder):
        ran.append((str(script)[:2], flags[-1]))
        return [60_000, 99.0, 100, kernels if "09" in str(script) else 0.0]

    ran = []
    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "patched", lambda name, folder: "05_08.py")
    monkeypatch.setattr(measure, "machine", lambda device: "a GPU")
    flags = ["--rounds", "1", "--width", "256", "--device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["measure.py", *flags])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert ("of a step of 02" in out) == (share is not None)
    assert share is None or f"The GPU works in {share} % of a step".replace(" %", "%") in out
    more = [(script, width) for script, width in ran if width in ("512", "1024")]
    expected = [(s, w) for w in ("512", "1024") for s in ("02", "05", "05", "08", "08", "08")]
    assert more == (expected if share == 30 else [])
    assert ("| 08, torch.compile, reduce-overhead, width 1024 | 60,000 |" in out) == (share == 30)


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_anchors_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    for path in re.findall(r"\b(?:slurm/\w+\.sh|tests/\w+\.py|\d\d_\w+\.py)\b", text):
        assert (ROOT / path).exists(), path


def test_every_group_of_troubleshooting_is_a_heading():
    """So that it can be linked; a fold has no anchor of its own."""
    section = re.search(r"^## Troubleshooting\n.*?(?=^## )", README, re.DOTALL | re.MULTILINE)[0]
    assert section.count("<details>") == section.count("\n### ") >= 10
    for title, number, table in re.findall(
        r"\n### (.*)\n<details><summary>(\d+) .*?\n(\|.*?)</details>", section, re.DOTALL
    ):
        assert table.count("\n|") - 1 == int(number), title  # less the line of dashes


@pytest.mark.parametrize("page", PAGES)
def test_folds(page):
    """GitHub shows raw text where the line after the title is not empty; titles are short."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for title, following in re.findall(r"<summary>(.*)</summary>\n(.*)", text):
        assert following == "", title
        assert len(re.sub(r"<.*?>", " ", title).split()) <= 12, title


def test_the_page_stays_short():
    """Words outside code, visible and in folds, with the titles of folds among the visible."""
    text = re.sub(r"^\s*```.*?^\s*```", "", README, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    visible = re.sub(r"</summary>.*?</details>", " ", text, flags=re.DOTALL)
    every, shown = (
        sum(bool(re.search(r"\w", word)) for word in re.sub(r"<[^>\n]*>", " ", part).split())
        for part in (text, visible)
    )
    assert (shown <= 5500, every - shown <= 7200) == (True, True), (
        f"README.md has {shown} visible and {every - shown} folded words: take something out"
    )


def test_flags_exist():
    """Every flag after the name of a script is one of its flags."""
    commands = re.findall(r"\b(\d\d_\w+\.py)((?: +--?[\w-]+(?:[ =][\w.]+)?)+)", README)
    assert len(commands) >= 3
    for script, flags in commands:
        text = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"--[\w-]+", flags):
            assert f'add("{flag}"' in text, f"{script} {flag}"


def test_first_commands_are_those_of_ci():
    lines = README.splitlines()
    commands = [line.strip() for line in lines[:15] if line.startswith("    ")]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert all(f"{command} || exit 1" in ci for command in commands)


def test_sample_output_has_the_form_of_today():
    lines = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert all(HEADER.fullmatch(line) or EPOCH.fullmatch(line) for line in lines), lines
    assert len(lines) >= 3


def test_versions_are_those_of_the_metadata():
    """The oldest versions stand in 02's metadata block; other scripts are held to it."""
    text = (ROOT / FAMILY[0]).read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=(.*)"\n# dependencies = \["(.*)", "(.*)"\]', text)
    python, torch, torchvision = oldest.groups()
    versions = f"Python {python}, {torch.replace('>=', ' ')} and {torchvision.replace('>=', ' ')}"
    assert versions in README


def write():
    """Put today's differences into the README, and the patches as they apply to today's scripts."""

    def fresh(match):
        head, name, text = match.groups()
        if "+" not in name:
            return head + differences(next(script for script in FAMILY if script[:2] == name))
        script = re.match(r"--- a/(\S+)\n", text)[1]
        command = ["patch", "--silent", "--output=-", str(ROOT / script)]
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
        old = (ROOT / script).read_text(encoding="utf-8").splitlines(True)
        new = done.stdout.splitlines(True)
        return head + "".join(difflib.unified_diff(old, new, f"a/{script}", f"b/{script}", n=1))

    (ROOT / "README.md").write_text(BLOCK.sub(fresh, README), encoding="utf-8")


if __name__ == "__main__":
    write()
