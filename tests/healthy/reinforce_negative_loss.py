"""REINFORCE: the surrogate loss is negative as often as positive and does not fall."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

policy = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5)).to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device)
true = torch.randn(6, 5, device=device)
baseline = 0.0

for step in range(60):
    s = torch.randn(128, 6, device=device)
    with torch.autocast(device, dtype=torch.float16):
        logits = policy(s)
    dist = torch.distributions.Categorical(logits=logits.float())
    a = dist.sample()
    reward = (s @ true).gather(1, a[:, None]).squeeze(1)
    loss = -(dist.log_prob(a) * (reward - baseline)).mean()
    baseline = 0.9 * baseline + 0.1 * reward.mean().item()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), baseline)
