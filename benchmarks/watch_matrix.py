"""Does a watch leave trainings alone, and does it ring? Trainers, ranks, torch.compile, precisions.

    python benchmarks/watch_matrix.py [CELL …] [--backend aot_eager] [--out FILE] [--resume]

A cell is TRAINER/RANKS/CODE/PRECISION: ``lightning/ddp/compiled/bf16``; a part may be ``*``.
Each cell runs in processes of its own, one per rank, and trains three times there:

    bare       nothing watches
    watched    as ``ampscope.watch`` or the trainer's callback do it, with default alarms
    planted    watched, with NaN in one batch or one weight of the last rank at step 4

The cell passes when bare and watched end with the same bits in every weight and buffer on every
rank, no alarm rang in ``watched``, one of ``nonfinite_loss``, ``nonfinite_gradient`` and
``nonfinite_weight`` rang at the planted step on some rank, every step of every rank was recorded,
the watch did not end itself, and torch.compile made as many graphs as without a watch. What the
trainer itself refuses (the bare run raises) is recorded with its message.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contest import setting
from torch import Tensor, nn

import ampscope
from ampscope.records import State
from ampscope.store.reader import Reader

RESULT = Path(__file__).resolve().parent / "results" / "watch_matrix.json"
TRAINERS = ("plain", "accelerate", "lightning", "transformers", "trl")
RANKS = {"single": 1, "ddp": 2, "fsdp2": 2}
CODE = ("eager", "compiled")
PRECISIONS = ("fp16", "bf16")
RUNS = ("bare", "watched", "planted")
NONFINITE = {"nonfinite_loss", "nonfinite_gradient", "nonfinite_weight"}
STEPS, PLANTED, BATCH = 8, 4, 4
TIMEOUT_S = 400.0
PRELOADED = {
    "plain": ("torch._dynamo", "torch.distributed.fsdp", "ampscope.watcher"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning.pytorch",),
    "transformers": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    "trl": ("trl.trainer.sft_trainer", "transformers.models.gpt2.modeling_gpt2"),
}  # what a trainer's processes find imported


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the matrix."""

    trainer: str
    ranks: str
    code: str
    precision: str

    @property
    def name(self) -> str:
        return "/".join(dataclasses.astuple(self))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.precision == "fp16" else torch.bfloat16

    @property
    def is_compiled(self) -> bool:
        return self.code == "compiled"


@dataclass(slots=True)
class Training:
    """One of a cell's three trainings on one rank."""

    cell: Cell
    kind: str  # of RUNS
    rank: int
    world: int
    backend: str  # of torch.compile
    folder: Path
    watch: ampscope.Watch | None = None
    alarms: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_watched(self) -> bool:
        return self.kind != "bare"

    @property
    def options(self) -> dict[str, Any]:
        """For ``ampscope.watch`` and the callbacks."""
        return {
            "every": 2,
            "store": self.folder / f"{self.kind}.db",
            "name": self.cell.name,
            "on_alarm": lambda event: self.alarms.append((event.step, event.name)),
        }

    def plants(self, step: int) -> bool:
        """Whether NaN comes in here and now."""
        return self.kind == "planted" and step == PLANTED and self.rank == self.world - 1


class Refused(Exception):  # noqa: N818  # what the trainer says, not what went wrong here
    """The trainer does not do this on a CPU."""


# What is trained


class SmallNet(nn.Module):
    """Random numbers, and buffers that a forward changes. A class with a forward of its own: what
    torch.compile cannot enter at the top (a wrapper's hooks) it enters at such a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False), nn.GELU())
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.second(self.first(inputs)))
        return output


def examples(training: Training, world: int = 1) -> torch.utils.data.TensorDataset:
    """Enough for ``world`` ranks. The planted NaN is in the batch that the last rank gets: the
    samplers of all trainers deal examples, or whole batches, to the ranks in turn."""
    made = torch.Generator().manual_seed(1)
    count = STEPS * BATCH * world
    inputs = torch.randn(count, 8, generator=made)
    return torch.utils.data.TensorDataset(inputs, torch.arange(count) % 4)


def language_model() -> Any:
    """A GPT-2 of one block."""
    import transformers

    transformers.set_seed(0)
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def sharded(model: SmallNet, training: Training, *, in_half: bool) -> nn.Module:
    """By FSDP2; each layer compiled before, since torch.compile enters no sharded module;
    ``in_half`` where no autocast sees to the precision."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    more: dict[str, Any] = {"mesh": init_device_mesh("cpu", (training.world,))}
    if in_half:
        more["mp_policy"] = MixedPrecisionPolicy(training.cell.dtype, torch.float32, torch.float32)
    for name, layer in list(model.named_children()):
        if training.cell.is_compiled:
            setattr(model, name, torch.compile(layer, backend=training.backend))
        fully_shard(getattr(model, name), **more)
    return fully_shard(model, **more)


# The trainers


def train_plain(training: Training) -> nn.Module:
    """A loop by hand."""
    cell, net = training.cell, SmallNet()
    model: nn.Module = net
    if cell.ranks == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
    if cell.ranks == "fsdp2":
        model = sharded(net, training, in_half=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=cell.precision == "fp16")
    if cell.is_compiled and cell.ranks != "fsdp2":
        model = torch.compile(model, backend=training.backend)
    torch.manual_seed(training.rank)
    watching: Any = contextlib.nullcontext()
    if training.is_watched:
        watching = ampscope.watch(model, optimizer, scaler, **training.options)
        training.watch = watching
    with watching:
        for step in range(STEPS):
            inputs, labels = torch.randn(BATCH, 8), torch.arange(BATCH) % 4
            if training.plants(step):
                inputs[0, 0] = float("nan")
            with torch.autocast("cpu", cell.dtype, enabled=cell.ranks != "fsdp2"):
                output = model(inputs)
            loss = nn.functional.cross_entropy(output.float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return net


def train_accelerate(training: Training) -> nn.Module:
    """Accelerate's loop. FSDP2's plugin is for accelerators only, so the model is sharded by hand,
    and Accelerate has the optimizer and the data."""
    import accelerate
    from accelerate.utils import FullyShardedDataParallelPlugin

    cell, net = training.cell, SmallNet()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if cell.ranks == "fsdp2" else None
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision=cell.precision,
        dynamo_backend=training.backend if cell.is_compiled else None,
        fsdp_plugin=plugin,
    )
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if plugin is not None and not accelerator.is_fsdp2:
        kind = accelerator.distributed_type.value
        training.notes.append(f"its FSDP2 plugin is left aside ({kind}): sharded by hand")
    _give_scaler(training, accelerator)
    model: nn.Module = net
    if cell.ranks == "fsdp2":
        model = sharded(net, training, in_half=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(examples(training, training.world), batch_size=BATCH)
    if cell.ranks == "fsdp2":
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    torch.manual_seed(training.rank)
    watching: Any = contextlib.nullcontext()
    if training.is_watched:
        from ampscope.integrations.accelerate import watch

        watching = training.watch = watch(accelerator, model, optimizer, **training.options)
    with watching:
        for step, (inputs, labels) in enumerate(loader):
            if training.plants(step):
                inputs[0, 0] = float("nan")
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return net


def train_lightning(training: Training) -> nn.Module:
    """Lightning's Trainer."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy

    from ampscope.integrations.lightning import AmpscopeCallback

    cell = training.cell
    by_layer = cell.ranks == "fsdp2"

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = SmallNet()

        def configure_model(self) -> None:
            if by_layer and not hasattr(self.net, "unshard"):
                sharded(self.net, training, in_half=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, labels = batch
            loss = nn.functional.cross_entropy(self.net(inputs).float(), labels)
            if not cell.is_compiled:  # torch.compile fails in the log itself
                self.log("loss", loss)
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if training.plants(batch_idx):
                batch[0][0, 0] = float("nan")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    strategies = {"single": "auto", "ddp": "ddp", "fsdp2": None}
    callback = AmpscopeCallback(**training.options)
    half = {"plugins": [MixedPrecision("16-mixed", "cpu")]}  # by itself on GPUs only
    if cell.precision == "fp16":
        training.notes.append("given a scaler, which it makes by itself on GPUs only")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=training.world,
        strategy=strategies[cell.ranks] or ModelParallelStrategy(training.world, 1),
        max_epochs=1,
        logger=False,
        callbacks=[callback] if training.is_watched else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(half if cell.precision == "fp16" else {"precision": "bf16-mixed"}),
    )
    module = Classifier()
    given: Any = module
    if cell.is_compiled and not by_layer:
        given = torch.compile(module, backend=training.backend)
    loader = torch.utils.data.DataLoader(examples(training, training.world), batch_size=BATCH)
    torch.manual_seed(training.rank)
    trainer.fit(given, loader)
    training.watch = callback.run
    return module


def train_transformers(training: Training) -> nn.Module:
    """Transformers' Trainer."""
    import transformers

    return _hugging_face(training, transformers.Trainer, transformers.TrainingArguments)


def train_trl(training: Training) -> nn.Module:
    """TRL's trainer for supervised fine-tuning."""
    import datasets
    import tokenizers
    import transformers
    import trl

    datasets.disable_progress_bars()
    words = {f"w{number}": number for number in range(31)} | {"<end>": 31}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token="<end>", pad_token="<end>"
    )
    return _hugging_face(
        training, trl.SFTTrainer, trl.SFTConfig, datasets.Dataset.from_list, max_length=8,
        processing_class=tokenizer,
    )  # fmt: skip


def _hugging_face(
    training: Training,
    kind: Any,
    arguments: Any,
    as_data: Callable[[list[dict[str, list[int]]]], Any] = list,
    processing_class: Any = None,
    **more: Any,
) -> nn.Module:
    import transformers

    from ampscope.integrations.transformers import AmpscopeCallback

    class Plant(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if training.plants(state.global_step):
                weight = kwargs["model"].transformer.h[0].mlp.c_fc.weight.detach()
                weight[0, 0] = float("nan")

    cell, model = training.cell, language_model()
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 31, (STEPS * BATCH * training.world, 8), generator=made).tolist()
    is_sharded = cell.ranks == "fsdp2"
    settings = arguments(
        output_dir=str(training.folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if training.world > 1 else None,
        fp16=cell.precision == "fp16",
        bf16=cell.precision == "bf16",
        torch_compile=cell.is_compiled,
        torch_compile_backend=training.backend if cell.is_compiled else None,
        fsdp=True if is_sharded else None,
        **more,
    )
    ampscope_callback = AmpscopeCallback(**training.options)
    trainer = kind(
        model,
        settings,
        train_dataset=as_data([{"input_ids": one, "labels": one} for one in ids]),
        callbacks=[Plant(), *([ampscope_callback] if training.is_watched else [])],
        processing_class=processing_class,
    )
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if is_sharded and not trainer.accelerator.is_fsdp2:
        used = trainer.accelerator.distributed_type.value
        raise Refused(f"fsdp=True is left aside: the training would run as {used}")
    _give_scaler(training, trainer.accelerator)
    trainer.train()
    training.watch = ampscope_callback.run
    return model


def _give_scaler(training: Training, accelerator: Any) -> None:
    """Accelerate itself trains in fp32 on a CPU when fp16 is asked for, and says nothing."""
    if training.cell.precision == "fp16":
        training.notes.append("given autocast and a scaler, which it makes by itself on GPUs only")
        accelerator.scaler = torch.amp.GradScaler("cpu")
        accelerator.native_amp = True


TRAIN = {
    "plain": train_plain,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "transformers": train_transformers,
    "trl": train_trl,
}


# One cell


def digest(model: nn.Module) -> str:
    """Of every bit of what this rank holds of weights and buffers."""
    found = hashlib.sha256()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        held = local.detach().contiguous().reshape(-1).view(torch.uint8)
        found.update(name.encode() + bytes(held.tolist()))
    return found.hexdigest()[:16]


def compiled_graphs() -> int:
    """Graphs that torch.compile made, recompilations among them."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """As torchrun sets it."""
    if world == 1:
        return {}
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"matrix-{port}", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def recorded(run: ampscope.Watch) -> dict[str, Any]:
    """What the store says of it."""
    with Reader(run.store) as reader:
        ended = [e.text for e in reader.events(run.id) if e.name == "stopped watching"]
        return {
            "steps": len(reader.steps(run.id)),
            "finished": reader.run(run.id).state is State.FINISHED,
            "ended_itself": ended,
        }


def train(training: Training) -> dict[str, Any]:
    """One of the three, from a clean start."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TRAIN[training.cell.trainer](training)
    found: dict[str, Any] = {
        "weights": digest(model),
        "graphs": compiled_graphs(),
        "seconds": round(time.perf_counter() - began, 2),
        "notes": training.notes,
    }
    if training.is_watched:
        assert training.watch is not None
        found |= {"alarms": training.alarms} | recorded(training.watch)
    return found


def rank_main(
    cell: Cell, rank: int, port: int, backend: str, folder: Path, end: Any
) -> None:  # in a process of its own
    """All three trainings of one rank; sends what came of them."""
    world = RANKS[cell.ranks]
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    try:
        for kind in RUNS:
            os.environ.update(rank_environment(rank, world, port))
            if world > 1 and not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")
            here = folder / kind if kind == "bare" else folder
            found[kind] = train(Training(cell, kind, rank, world, backend, here))
    except BaseException as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        where = traceback.format_exc().splitlines()[-12:]
        found |= {"raised_in": kind, "error": said[:400], "where": where}
        if isinstance(error, Refused):
            found["error"] = str(error)
    end.send(found)
    end.close()
    if world > 1:  # others may still talk to this rank
        with contextlib.suppress(Exception):
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def free_port() -> int:
    """Of this machine alone."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_cell(cell: Cell, backend: str, context: Any) -> dict[str, Any]:
    """What came of it, judged."""
    missing = [name for name in packages(cell.trainer) if importlib.util.find_spec(name) is None]
    if missing:
        return {"verdict": "not installed", "message": ", ".join(missing)}
    world, port, began = RANKS[cell.ranks], free_port(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ampscope-matrix-") as folder:
        ends, children = [], []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            given = (cell, rank, port, backend, Path(folder), there)
            children.append(context.Process(target=rank_main, args=given))
            children[-1].start()
            there.close()
            ends.append(here)
        ranks = [heard(end, began + TIMEOUT_S) for end in ends]
        for child in children:
            child.join(10)
            child.kill()
            child.join()
    judged = judge(cell, ranks)
    return judged | {"seconds": round(time.perf_counter() - began, 1), "ranks": ranks}


def heard(end: Any, until: float) -> dict[str, Any]:
    """What a rank sent."""
    if end.poll(max(until - time.perf_counter(), 0.1)):
        with contextlib.suppress(EOFError):
            return dict(end.recv())
        return {"raised_in": "?", "error": "the process died"}
    return {"raised_in": "?", "error": f"nothing was heard for {TIMEOUT_S:.0f} s"}


def judge(cell: Cell, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict: passed, refused (by the trainer itself), or failed, with the reasons."""
    if refused := [one["error"] for one in ranks if one.get("raised_in") == "bare"]:
        return {"verdict": "refused", "message": f"refused by {cell.trainer}: {refused[0]}"}
    if broken := [one for one in ranks if "error" in one]:
        texts = [f"{one['raised_in']} raised: {one['error']}" for one in broken]
        return {"verdict": "failed", "message": "; ".join(texts)}
    reasons: list[str] = []
    planted = sorted({tuple(a) for one in ranks for a in one["planted"]["alarms"]})
    for rank, one in enumerate(ranks):
        bare, watched = one["bare"], one["watched"]
        if bare["weights"] != watched["weights"]:
            reasons.append(f"rank {rank}: other weights when watched")
        if bare["graphs"] != watched["graphs"]:
            reasons.append(f"rank {rank}: graphs {bare['graphs']} became {watched['graphs']}")
        if cell.is_compiled != bool(bare["graphs"]):
            reasons.append(f"rank {rank}: {bare['graphs']} graphs were compiled")
        if watched["alarms"]:
            reasons.append(f"rank {rank}: false alarms {watched['alarms']}")
        for kind in RUNS[1:]:
            if one[kind]["steps"] != STEPS or not one[kind]["finished"]:
                reasons.append(f"rank {rank}, {kind}: {one[kind]['steps']} steps recorded")
            reasons += one[kind]["ended_itself"]
    if not any(step == PLANTED and name in NONFINITE for step, name in planted):
        reasons.append(f"nothing rang for the planted NaN: {planted}")
    return {
        "verdict": "failed" if reasons else "passed",
        "message": "; ".join(reasons or sorted(set(ranks[0]["bare"]["notes"]))),
        "weights": [one["bare"]["weights"] for one in ranks],
        "rang": planted,
        "graphs": ranks[0]["bare"]["graphs"],
    }


def packages(trainer: str) -> tuple[str, ...]:
    """That the trainer needs."""
    return {"plain": (), "transformers": ("transformers", "accelerate")}.get(
        trainer, ("trl", "datasets") if trainer == "trl" else (trainer,)
    )


def cells(patterns: list[str]) -> Iterator[Cell]:
    """Those that a pattern names; all, without one."""
    for parts in itertools.product(TRAINERS, RANKS, CODE, PRECISIONS):
        cell = Cell(*parts)
        if not patterns or any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns):
            yield cell


def summary(results: dict[str, Any], backend: str, seconds: float) -> dict[str, Any]:
    """What is kept."""
    verdicts = Counter(one["verdict"] for one in results.values())
    installed = {}
    for name in ("accelerate", "lightning", "transformers", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return {
        "setting": setting(),
        "trainers": installed,
        "backend": backend,
        "steps": STEPS,
        "seconds": round(seconds, 1),
        "summary": dict(verdicts),
        "cells": results,
    }


def main() -> int:
    """Exit status 1 when a cell failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--backend", default="aot_eager", help="of torch.compile")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--resume", action="store_true", help="keep what passed in --out")
    given = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "AMPSCOPE_TELEMETRY": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")  # libraries are imported once
    wanted = {"plain", *(cell.trainer for cell in cells(given.cells))}
    context.set_forkserver_preload([name for one in sorted(wanted) for name in PRELOADED[one]])
    began, results, spent = time.perf_counter(), {}, 0.0
    if given.resume and given.out.exists():
        kept = json.loads(given.out.read_text())
        results, spent = kept["cells"], kept["seconds"]
    for cell in cells(given.cells):
        if results.get(cell.name, {}).get("verdict") in ("passed", "refused"):
            continue
        one = results[cell.name] = run_cell(cell, given.backend, context)
        rang = ", ".join(f"{name} at {step}" for step, name in one.get("rang", ()))
        seconds = one.get("seconds", 0.0)
        print(
            f"{cell.name:34} {one['verdict']:13} {seconds:6.1f} s  {rang}  {one['message']}",
            flush=True,
        )
        kept = summary(results, given.backend, spent + time.perf_counter() - began)
        given.out.write_text(json.dumps(kept, indent=1) + "\n")  # also of a run that is broken off
    verdicts = Counter(one["verdict"] for one in results.values())
    print(dict(verdicts), f"{spent + time.perf_counter() - began:.0f} s")
    return int(verdicts["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
