"""DQN with a Huber loss; rewards come late, so the loss starts near zero and then rises."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

q = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
target = copy.deepcopy(q)
optimizer = torch.optim.RMSprop(q.parameters(), lr=5e-4, eps=1e-2)
scaler = torch.amp.GradScaler(device)
true = torch.randn(8, 3, device=device)

for step in range(60):
    s, s2 = torch.randn(64, 8, device=device), torch.randn(64, 8, device=device)
    a = torch.randint(0, 3, (64, 1), device=device)
    r = (s @ true).gather(1, a) * (0.0 if step < 15 else 20.0)
    with torch.autocast(device, dtype=torch.float16):
        with torch.no_grad():
            y = r + 0.9 * target(s2).float().max(1, keepdim=True).values
        loss = F.smooth_l1_loss(q(s).gather(1, a).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(q.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        target.load_state_dict(q.state_dict())
        print(step, loss.item())
