"""TD learning of a critic: its target grows as it learns, and so does its loss."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

critic = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
critic = critic.to(device)
target = copy.deepcopy(critic)
optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)
gamma = 0.99

for step in range(80):
    state = torch.randn(128, 16, device=device).abs()
    following = state + 0.1 * torch.randn_like(state)
    reward = 5.0 * state.mean(1, keepdim=True) * (1 + step / 4)  # the policy collects more and more
    with torch.no_grad():
        bootstrap = reward + gamma * target(following)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        value = critic(state)
    loss = F.mse_loss(value.float(), bootstrap)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for p, t in zip(critic.parameters(), target.parameters()):
            t.lerp_(p, 0.3)
    if step % 10 == 0:
        print(step, loss.item(), value.mean().item())
