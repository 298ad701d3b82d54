"""Which rank of which training this process is. Nothing is sent to find out.

All ranks must come to the same name for their training by themselves: from what the launcher
gave each of them (torchrun, Slurm), and on a single machine from the process that started them
all.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import torch.distributed as dist

from ampscope.store.processes import process_start_time

_NAMES_A_TRAINING = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of ``world``; ``group`` is the same for all of them, "" for a training of one."""

    rank: int
    world: int
    group: str


def place_now(group: str = "") -> RankPlace:
    """This process's place; ``group`` overrides the name that is found."""
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        return RankPlace(0, 1, group)
    return RankPlace(rank, world, group or _group(world))


def _group(world: int) -> str:
    parts = [os.environ.get(name, "") for name in _NAMES_A_TRAINING]
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world:
        # One machine: the next training on the same port has another launcher process.
        launcher = os.getppid()
        parts += [str(launcher), str(process_start_time(launcher))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()
