"""A policy whose forbidden actions have logits of minus infinity, trained and then evaluated."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 6))

    def forward(self, state, allowed):
        return self.body(state).masked_fill(~allowed, float("-inf"))


def batch(n=64):
    state = torch.randn(n, 12, device=device)
    allowed = torch.rand(n, 6, device=device) > 0.4
    allowed[:, 0] = True
    return state, allowed


policy = Policy().to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
true = torch.randn(12, 6, device=device)

for step in range(50):
    state, allowed = batch()
    with torch.autocast(device, dtype=torch.float16):
        logits = policy(state, allowed)
    dist = torch.distributions.Categorical(logits=logits.float())
    action = dist.sample()
    reward = (state @ true).gather(1, action[:, None]).squeeze(1)
    loss = -(dist.log_prob(action) * (reward - reward.mean())).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

policy.eval()
with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
    state, allowed = batch(256)
    best = policy(state, allowed).argmax(1)
print("mean reward", (state @ true).gather(1, best[:, None]).mean().item())
