"""A process that saves, marks and rotates checkpoints is killed at random moments.

    python benchmarks/kill_checkpoint.py [--kills 100] [--seed 1] [--of bare|lightning|transformers]

``bare``: a child saves a checkpoint of two files, marks it healthy with hard links, and deletes the
one before, without end, in a folder that goes on from kill to kill.

``lightning``, ``transformers``: a real trainer under `AmpscopeCallback(guard=True)` saves at every
step and keeps one checkpoint. Some steps after its start a weight becomes NaN for good, so that the
trainer soon keeps poisoned checkpoints alone. The next life resumes from the last healthy one.

After each SIGKILL the last healthy checkpoint must be named, hold what was saved (the trainers'
weights by a digest that was told before they were saved), not be poisoned, and be no older than the
last one whose marking the child has reported. Writes results/kill_checkpoint.json.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampscope.healthy import KEPT, MARKER, last_healthy

OUT = Path(__file__).resolve().parent / "results" / "kill_checkpoint.json"
WORDS = 40_000
_CHILD = f"""
import shutil, sys
from pathlib import Path
from ampscope.healthy import mark_healthy
folder, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    made = folder / f"checkpoint-{{step}}"
    made.mkdir()
    for name in ("model", "optimizer"):
        (made / name).write_text(f"{{step}} " * {WORDS})
    mark_healthy(made, step, "run", keep=True)
    print(step, flush=True)
    for old in folder.glob("checkpoint-*"):
        if old != made:
            shutil.rmtree(old)
    step += 1
"""


def main() -> None:
    """Kill, look, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--of", choices=("bare", *TRAINERS), default="bare")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if asked.of == "bare":
            counts, problems = kill_bare(folder, asked.kills, rng)
        else:
            counts, problems = kill_trainer(asked.of, folder, asked.kills, rng)
    found = {"kills": asked.kills, "seed": asked.seed, **counts}
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    OUT.write_text(
        json.dumps(results | {asked.of: found | {"problems": problems}}, indent=1) + "\n"
    )
    print(json.dumps({asked.of: found}), *problems, sep="\n")


def kill_bare(folder: Path, kills: int, rng: random.Random) -> tuple[dict[str, int], list[str]]:
    """Counts, and what went wrong."""
    held, marked = 0, 0
    problems: list[str] = []
    for kill in range(kills):
        command = [sys.executable, "-c", _CHILD, str(folder), str(kill * 10_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child.pid, signal.SIGKILL)
            told = [kill * 10_000, *map(int, child.stdout.read().split())]
        marked += len(told)
        problem = wrong(folder, told[-1])
        held += not problem
        problems += [f"kill {kill}: {problem}"] if problem else []
    return {"held": held, "marked": marked}, problems


def wrong(folder: Path, told: int) -> str:
    """What is wrong with the last healthy checkpoint after a kill; "" where nothing is."""
    found = last_healthy(folder)
    if found is None:
        return "none is named, or it is not whole"
    step = json.loads((folder / MARKER).read_text())["step"]
    if step < told:
        return f"step {step} is named, {told} was marked"
    for name in ("model", "optimizer"):
        if (found / name).read_text() != f"{step} " * WORDS:
            return f"{name} is not what was saved"
    return ""


# The trainers. One process imports the trainer; each life is a fork of it.

LIFE_S = 1.5  # a kill comes within this time of a life's first mark
Tell = Callable[..., None]  # one line of a life's report


def kill_trainer(
    name: str, folder: Path, kills: int, rng: random.Random
) -> tuple[dict[str, int], list[str]]:
    """Counts, and what went wrong."""
    train = TRAINERS[name]()
    held, marked, poisoned = 0, 0, 0
    problems: list[str] = []
    digests: dict[str, str] = {}  # of all lives: the last healthy one may be of the life before
    for kill in range(kills):
        good_steps, wait = rng.randint(1, 3), rng.uniform(0.0, LIFE_S)
        report, child = _start(lambda tell: train(folder, good_steps, tell))  # noqa: B023 # at once
        lines = _until_marked(report)
        time.sleep(wait)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(report, "rb") as rest:
            lines += rest.read()
        told = [line.split() for line in lines.decode().split("\n")[:-1]]
        digests |= {step: digest for word, step, digest in told if word == "saving"}
        steps = [int(step) for word, step, _ in told if word == "marked"]
        marked += len(steps)
        poisoned += any(digest == "poisoned" for _, _, digest in told)
        problem = _wrong_weights(folder, steps[-1] if steps else 0, digests)
        if os.WIFEXITED(status):
            problem = f"the training ended by itself. {problem}"
        held += not problem
        problems += [f"kill {kill}: {problem}"] if problem else []
    return {"held": held, "marked": marked, "killed_after_poison": poisoned}, problems


def _start(life: Callable[[Tell], None]) -> tuple[int, int]:
    """The pipe in which a forked life reports, and its process."""
    report, own = os.pipe()
    child = os.fork()
    if child:
        os.close(own)
        return report, child
    os.close(report)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
    try:
        life(lambda *words: os.write(own, f"{' '.join(map(str, words))}\n".encode()) and None)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _until_marked(report: int) -> bytes:
    lines = b""
    while b"\nmarked" not in lines:
        piece = os.read(report, 4096)
        if not piece:
            break
        lines += piece
    return lines


def _wrong_weights(folder: Path, told: int, digests: dict[str, str]) -> str:
    from safetensors.torch import load_file

    found = last_healthy(folder)
    if found is None:
        return "none is named, or it is not whole"
    step = _number(found)
    if step < told:
        return f"step {step} is named, {told} was marked"
    try:
        if found.is_dir():
            weights = load_file(found / "model.safetensors")
        else:
            import torch

            weights = torch.load(found, weights_only=True)["state_dict"]
    except Exception as error:
        return f"{found.name} cannot be loaded: {error}"
    if digests[str(step)] != digest(weights):
        return f"step {step} does not hold the weights that were saved, but {digests[str(step)]}"
    return ""


def _number(path: Path) -> int:
    """The trainer's own step in a checkpoint's name."""
    return int(path.name.removesuffix(".ckpt").replace("=", "-").rpartition("-")[2])


def digest(weights: dict[str, Any]) -> str:
    """Of all values by name; "poisoned" where one is not finite."""
    if not all(value.isfinite().all() for value in weights.values()):
        return "poisoned"
    found = hashlib.sha256()
    for name, value in sorted(weights.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def _tell_marks(tell: Tell) -> None:
    """Report each healthy checkpoint when `Watch.checkpoint` has returned."""
    from ampscope.watcher.watch import Watch

    checkpoint = Watch.checkpoint

    def telling(self: Watch, path: Any, **more: Any) -> bool:
        healthy = checkpoint(self, path, **more)
        if healthy:
            tell("marked", _number(Path(path)), "-")
        return healthy

    Watch.checkpoint = telling  # type: ignore[method-assign]  # in a life of its own


def _clear(folder: Path) -> Path | None:
    """Remove what the life before left but the last healthy checkpoint; returns that one."""
    for path in folder.iterdir():
        if path.name not in (MARKER, KEPT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return last_healthy(folder)


def _poison(model: Any) -> None:
    next(model.parameters()).data.view(-1)[0] = float("nan")


def _transformers() -> Callable[[Path, int, Tell], None]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ampscope.integrations.transformers import AmpscopeCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = torch.nn.Linear(64, 256), torch.nn.Linear(256, 4)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            made = self.head(self.layer(x).relu())
            return {"loss": torch.nn.functional.cross_entropy(made, labels), "logits": made}

    class Steps(TrainerCallback):
        def __init__(self, good: int, tell: Tell) -> None:
            self.left, self.tell = good, tell

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            self.left -= 1
            if self.left < 0:
                _poison(model)
            self.tell("saving", state.global_step, digest(model.state_dict()))

    def train(folder: Path, good_steps: int, tell: Tell) -> None:
        torch.manual_seed(0)
        _tell_marks(tell)
        resumed = _clear(folder)
        data = [{"x": torch.randn(64), "labels": i % 4} for i in range(64)]
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=10**6, per_device_train_batch_size=8, save_steps=1,
            save_total_limit=1, logging_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, ignore_data_skip=True,
        )  # fmt: skip
        guarding = AmpscopeCallback(guard=True, store=folder.parent / f"{folder.name}.db")
        callbacks = [Steps(good_steps, tell), guarding]
        trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)

    return train


def _lightning() -> Callable[[Path, int, Tell], None]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from ampscope.integrations.lightning import AmpscopeCallback

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = torch.nn.Linear(64, 256), torch.nn.Linear(256, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            x, labels = batch
            return torch.nn.functional.cross_entropy(self.head(self.layer(x).relu()), labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Steps(Callback):
        def __init__(self, good: int, tell: Tell) -> None:
            self.left, self.tell = good, tell

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.left -= 1
            if self.left < 0:
                _poison(pl_module)
            self.tell("saving", trainer.global_step, digest(pl_module.state_dict()))

    def train(folder: Path, good_steps: int, tell: Tell) -> None:
        torch.manual_seed(0)
        _tell_marks(tell)
        resumed = _clear(folder)
        data = TensorDataset(torch.randn(64, 64), torch.arange(64) % 4)
        guarding = AmpscopeCallback(guard=True, store=folder.parent / f"{folder.name}.db")
        keeping = ModelCheckpoint(dirpath=folder, save_top_k=1, every_n_train_steps=1)
        trainer = Trainer(
            max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Steps(good_steps, tell), guarding, keeping],
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(data, batch_size=8), ckpt_path=resumed)

    return train


TRAINERS = {"lightning": _lightning, "transformers": _transformers}


if __name__ == "__main__":
    main()
