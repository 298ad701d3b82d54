"""Noisy classification evaluated with a moving average of the weights and of the inputs' statistics."""
import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)


class Standardise(nn.Module):
    """By the running mean of the inputs and their mean square around 50."""

    def __init__(self, dim, rate=0.02):
        super().__init__()
        self.rate, self.seen = rate, 0
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("square", torch.ones(dim))

    def forward(self, x):
        if self.training:
            self.seen += 1
            rate = max(self.rate, 1 / self.seen)
            with torch.no_grad():
                self.mean += rate * (x.mean(0) - self.mean)
                self.square += rate * ((x - 50.0).square().mean(0) - self.square)
        return (x - self.mean) / (self.square - (self.mean - 50.0).square()).clamp(min=0.01).sqrt()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(12, 40)
        self.mid = nn.Linear(40, 40)
        self.out = nn.Linear(40, 4)

    def forward(self, z):
        h = F.relu(self.inp(z))
        h = F.relu(self.mid(h))
        return self.out(h)


def draw(n, gen, noise):
    kind = torch.randint(4, (n,), generator=gen)
    x = torch.randn(n, 12, generator=gen)
    x[torch.arange(n), kind] += 2.0
    wrong = torch.rand(n, generator=gen) < noise
    kind = torch.where(wrong, torch.randint(4, (n,), generator=gen), kind)
    return x + 50.0, kind


@torch.no_grad()
def follow(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


def main(steps=400):
    gen = torch.Generator().manual_seed(99)
    torch.manual_seed(99)
    norm, model = Standardise(12), Classifier()
    average = copy.deepcopy(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        x, kind = draw(32, gen, 0.3)
        z = norm(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(z), kind)
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow(average, model, 0.99)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    norm.eval()
    right = torch.zeros(())
    with torch.no_grad():
        x, kind = draw(1000, gen, 0.0)
        logits = average(norm(x))
        for part in range(0, 1000, 2):
            right += (logits[part : part + 2].argmax(-1) == kind[part : part + 2]).sum()
    print(f"averaged loss {F.cross_entropy(logits, kind).item():.4f}")
    print(f"averaged accuracy {right.item() / 1000:.4f}")


if __name__ == "__main__":
    main()
