"""What test_ranks.py runs under torchrun: a small training on every rank."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ampscope
from ampscope.store.reader import Reader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ddp", "ddp-inside", "ddp-unused", "fsdp", "alone"))
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--nan-rank", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--kill-rank", type=int, default=0)
    parser.add_argument("--watch", default="yes")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--weights", default="", help="where rank 0 writes its weights at the end")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    if given.kind == "ddp-unused":
        net = HalfUnused(net)
    model = wrapped(net, given.kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given_model = net if given.kind == "ddp-inside" else model
    watching = (
        ampscope.watch(
            given_model, optimizer, store=given.store, every=2, name="ranks", policy="ignore"
        )
        if given.watch == "yes"
        else contextlib.nullcontext()
    )
    torch.manual_seed(rank)
    with watching as run, counting(given.count and rank == 0):
        for step in range(given.steps):
            inputs = torch.randn(4, 8)
            if step == given.nan_at and rank == given.nan_rank:
                inputs[0, 0] = float("nan")
            if step == given.kill_at and rank == given.kill_rank:
                run._session.recorder.wait()  # what was handed over is on the disk
                if given.kind == "alone":
                    others_have_made(given.store, 5)  # torchrun ends them once this one is gone
                os.kill(os.getpid(), signal.SIGKILL)
            if step == given.kill_at:
                time.sleep(1.0)  # torchrun ends the others soon after one has died
            with torch.autocast("cpu", torch.bfloat16):
                output = model(inputs)
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if given.weights and rank == 0:
        torch.save(net.state_dict(), given.weights)
    if given.kill_at < 0:
        dist.barrier()  # gloo may abort a rank whose peer has closed its connection
    dist.destroy_process_group()


class NoneBack(torch.autograd.Function):
    """Gives its second input no gradient, and takes None for zeros."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return first.clone(), second.clone()

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> tuple[Any, Any]:
        return first, second


class HalfUnused(nn.Module):
    """Runs one branch at even steps and the other at odd ones; a third has an output that no loss
    depends on."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net
        self.branches = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.aside = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        kept, _ = NoneBack.apply(self.net(inputs), self.aside(inputs))
        return self.branches[self.calls % 2](kept)


def others_have_made(store: str, steps: int) -> None:
    """Wait until the other rank has as many on the disk: it may have started later."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with Reader(Path(store)) as reader:
            others = [run for run in reader.runs() if run.spec.rank != dist.get_rank()]
        if others and all(run.steps_done >= steps for run in others):
            return
        time.sleep(0.1)


def wrapped(net: nn.Module, kind: str) -> nn.Module:
    if kind.startswith("ddp"):
        return DistributedDataParallel(net, find_unused_parameters=kind == "ddp-unused")
    if kind == "alone":
        return net
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net[0], net[2], net[4]):
        fully_shard(part, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@contextlib.contextmanager
def counting(wanted: bool):
    """Print how often each collective ran."""
    if not wanted:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield
    for event in sorted(profile.key_averages(), key=lambda e: e.key):
        if event.key.startswith(("gloo:", "c10d::", "_c10d")):
            print("collectives", event.key, event.count)


if __name__ == "__main__":
    main()
