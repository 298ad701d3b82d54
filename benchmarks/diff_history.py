"""A made-up repository with one commit that changes what a training computes, for ``git bisect``.

    python benchmarks/diff_history.py FOLDER --commits 60 --bad 37
    python benchmarks/diff_history.py FOLDER --commits 60 --bad 37 --bisect   # and find it again

Its commits rename variables, add comments, logging, options and modules without weights, move code
to another file, and some cannot run at all. One makes the epsilon of a normalization larger. What
``git bisect run ampscope diff`` says is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MODEL = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, width={width}):
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width{eps})
        self.head = nn.Linear(width, 1)

    def forward(self, {x}):
        {h} = self.norm(self.inner({x}))
        {h} = {h}.relu()
        return self.head({h})
"""
TRAIN = """\
import torch
{imports}from model import Net

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr={lr})
for step in range({steps}):
    batch = torch.randn(16, 8)
{inside}    loss = (net(batch) - batch.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
{end}"""


def git(folder: Path, *args: str) -> str:
    """Run git there, as nobody in particular."""
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    done = subprocess.run(
        ["git", *who, *args], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def make(
    folder: Path, commits: int, bad: int, broken_ones: Sequence[int] = (), seed: int = 0
) -> list[str]:
    """Write the history; returns its commits, oldest first. ``bad`` is the place of the one that
    changes the computation, 1 or more; the first and the last commit can run. ``broken_ones`` are
    places of commits that cannot, and no other then is one."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    choose = random.Random(seed)
    parts = {"x": "x", "h": "h", "eps": "", "width": "16", "lr": "0.01", "steps": "6"}
    parts |= {"imports": "", "inside": "", "end": ""}
    made: list[str] = []
    for number in range(commits):
        subject, broken = "Start", False
        if number == bad:
            parts["eps"], subject = ", eps=1e-3", "Model: tidy the normalization"
        elif number:
            subject, broken = _change(parts, number, choose, last=number == commits - 1)
        train = TRAIN.format(**parts)
        if number in broken_ones or (broken and not broken_ones):
            train = train.replace("for step in", "fro step in", 1)
        (folder / "model.py").write_text(MODEL.format(**parts))
        (folder / "train.py").write_text(train)
        (folder / "NOTES").write_text(f"{number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", subject)
        made.append(git(folder, "rev-parse", "HEAD"))
    return made


def _change(
    parts: dict[str, str], number: int, choose: random.Random, *, last: bool
) -> tuple[str, bool]:
    """A commit that computes the same, or that cannot run."""
    kind = choose.choice(("name", "hidden", "log", "comment", "import", "broken", "end"))
    if kind == "broken" and not last:
        return "Train: half of a change", True
    if kind == "name":
        parts["x"] = choose.choice(("x", "batch", "features", "given"))
        return f"Model: call the input {parts['x']}", False
    if kind == "hidden":
        parts["h"] = choose.choice(("h", "hidden", "state", "out"))
        return f"Model: call the hidden state {parts['h']}", False
    if kind == "log":
        parts["inside"] = f"    if step == {number % 5}:\n        print('step', step)\n"
        return "Train: log a step", False
    if kind == "import":
        parts["imports"] = choose.choice(("import math\n", "import time\n", ""))
        return "Train: imports", False
    if kind == "end":
        parts["end"] = f"print('done {number}', loss.item())\n"
        return "Train: print the loss", False
    parts["end"] = f"# change {number}\n"
    return "Comments", False


def bisect(folder: Path, good: str, store: Path) -> dict[str, object]:
    """``git bisect run ampscope diff RUN train.py``, RUN being the good commit's, recorded once."""
    ampscope = [sys.executable, "-m", "ampscope.cli.main", "diff", "--store", str(store)]
    started = time.monotonic()
    git(folder, "checkout", "-q", good)
    out = folder.parent / "good.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    subprocess.run(
        [*ampscope, "--quiet", "--json", str(out), "train.py", "train.py"],
        cwd=folder, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    run = json.loads(out.read_text())["a"]["runs"][0]
    git(folder, "bisect", "start", "main", good)
    done = subprocess.run(
        ["git", "bisect", "run", *ampscope, run, "train.py"],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = git(folder, "bisect", "log")
    found = re.search(r"([0-9a-f]{40}) is the first (?:bad|new) commit", done.stdout)
    return {
        "first_bad": found[1] if found else None,
        "status": done.returncode,
        "tried": len(re.findall(r"^git bisect (?:good|bad|skip) ", log, re.MULTILINE)),
        "skipped": len(re.findall(r"^git bisect skip ", log, re.MULTILINE)),
        "wall_s": round(time.monotonic() - started, 1),
        "last_words": done.stdout[-1500:],
    }


def main() -> None:
    """Make the history, and with --bisect find its commit again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commits", type=int, default=60)
    parser.add_argument("--bad", type=int, default=37)
    parser.add_argument("--broken", type=int, nargs="*", default=(), help="places; else by chance")
    parser.add_argument("--bisect", action="store_true")
    options = parser.parse_args()
    if not 0 < options.bad < options.commits:
        parser.error("--bad must lie behind the first commit and within the history")
    made = make(options.folder, options.commits, options.bad, options.broken)
    if options.bisect:
        found = bisect(options.folder, made[0], options.folder.parent / "bisect.db")
        found |= {"commits": options.commits, "right": found["first_bad"] == made[options.bad]}
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
