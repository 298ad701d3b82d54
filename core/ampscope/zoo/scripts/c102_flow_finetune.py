"""Fine-tune a small flow-matching policy, held near its first weights by a penalty."""

import copy

import torch
import torch.nn as nn


class Velocity(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.inp = nn.Linear(dim + 5, hidden)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, t, context):
        return self.out(self.mid(self.inp(torch.cat([x, t[:, None], context], dim=-1))))


def batch(mix, size):
    context = torch.randn(size, 4)
    goal = torch.tanh(context @ mix) + 0.05 * torch.randn(size, mix.shape[1])
    noise, t = torch.randn_like(goal), torch.rand(size)
    return (1 - t[:, None]) * noise + t[:, None] * goal, t, context, goal - noise


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Velocity(dim=6, hidden=64).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    mix = torch.randn(4, 6)
    with torch.autocast(device, dtype=torch.bfloat16):
        for step in range(120):
            with torch.autocast(device, enabled=False):
                x, t, context, target = (part.to(device) for part in batch(mix, 128))
            velocity = policy(x, t, context).float()
            penalty = (velocity - reference(x, t, context).float()).pow(2).mean()
            loss = (velocity - target).pow(2).mean() + 0.02 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.4f} penalty {penalty.item():.6f}")


if __name__ == "__main__":
    main()
