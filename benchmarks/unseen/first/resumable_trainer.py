"""Trainer with accumulation, cosine schedule, EMA, checkpoints and resume."""
import copy
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    micro: int = 16
    accumulate: int = 4
    updates_per_run: int = 20
    runs: int = 3
    lr: float = 0.05
    ema: float = 0.95


class Trainer:
    def __init__(self, args):
        torch.manual_seed(2024)
        self.args = args
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.updates_per_run * args.runs)
        self.scaler = torch.amp.GradScaler("cpu")
        self.update = 0
        self.history = []

    def parts(self):
        return {"model": self.model, "ema": self.ema, "opt": self.opt, "sched": self.sched, "scaler": self.scaler}

    def save(self, path):
        torch.save({"update": self.update, **{k: v.state_dict() for k, v in self.parts().items()}}, path)

    def resume(self, path):
        state = torch.load(path, weights_only=True)
        self.update = state["update"]
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def one_update(self, data):
        self.opt.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(self.args.accumulate):
            x, y = data(self.args.micro)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 50 * F.cross_entropy(self.model(x), y) / self.args.accumulate
            self.scaler.scale(loss).backward()
            total += loss.item()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.sched.step()
        with torch.no_grad():
            for e, p in zip(self.ema.parameters(), self.model.parameters()):
                e.lerp_(p, 1 - self.args.ema)
        self.history.append(total)
        self.update += 1


def main():
    args = Args()
    centres = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    def data(n):
        y = torch.randint(5, (n,))
        return centres[y] + 1.5 * torch.randn(n, 16), y

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ckpt.pt")
        for run in range(args.runs):
            trainer = Trainer(args)
            if os.path.exists(path):
                trainer.resume(path)
            for _ in range(args.updates_per_run):
                trainer.one_update(data)
            trainer.save(path)
            print(f"run {run} update {trainer.update} loss {trainer.history[-1]:.3f} scale {trainer.scaler.get_scale():g}")


if __name__ == "__main__":
    main()
