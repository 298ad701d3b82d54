"""Distil a wide teacher into a narrow student; temperature and hard labels."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Args:
    steps: int = 60
    batch: int = 32
    lr: float = 1e-2
    temperature: float = 3.0
    alpha: float = 0.5
    seed: int = 111


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 5)

    def forward(self, x):
        x = F.gelu(self.first(x))
        x = F.gelu(self.second(x))
        return self.last(x)


class Distiller:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(args.seed)
        self.gen = torch.Generator().manual_seed(args.seed)
        self.teacher = MLP(64).eval().requires_grad_(False)
        for p in self.teacher.parameters():
            p.mul_(3.0)
        self.student = MLP(24)
        self.optim = torch.optim.AdamW(self.student.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def sample(self, n):
        x = torch.randn(n, 8, generator=self.gen)
        with torch.no_grad():
            target = self.teacher(x)
        return x, target

    def loss(self, logits, target):
        T = self.args.temperature
        soft = F.kl_div(
            F.log_softmax(logits.float() / T, dim=-1), F.softmax(target / T, dim=-1), reduction="batchmean"
        ) * T * T
        hard = F.cross_entropy(logits.float(), target.argmax(-1))
        return self.args.alpha * soft + (1 - self.args.alpha) * hard

    def run(self):
        for step in range(self.args.steps):
            x, target = self.sample(self.args.batch)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = self.student(x)
                loss = self.loss(logits, target)
            self.optim.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optim)
            self.scaler.update()
            if step % 15 == 0:
                print(f"step {step:3d}: loss {loss.item():.4f}")
        self.report()

    @torch.no_grad()
    def report(self):
        x, target = self.sample(512)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = self.loss(self.student(x), target)
        print(f"held-out: loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    Distiller(Args()).run()
