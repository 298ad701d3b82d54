"""A critic in bf16 whose policy collects ever more: its loss grows a thousandfold while it learns."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

critic = nn.Sequential(
    nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
)
critic = critic.to(device)
target = copy.deepcopy(critic)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
gamma = 0.9

for step in range(80):
    state = torch.randn(128, 16, device=device).abs()
    following = state + 0.1 * torch.randn_like(state)
    reward = state.mean(1, keepdim=True) * 1.08**step  # the policy collects more and more
    with torch.no_grad():
        bootstrap = reward + gamma * target(following)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.bfloat16):
        value = critic(state)
    loss = F.mse_loss(value.float(), bootstrap)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, t in zip(critic.parameters(), target.parameters()):
            t.lerp_(p, 0.1)
    if step % 10 == 0:
        print(step, loss.item(), value.mean().item())
