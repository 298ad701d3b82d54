"""A training loop of one's own, watched: the `with` line is all that ampscope adds.

    python examples/plain_loop.py

Look at the run with `ampscope dashboard`, or send it on with `ampscope export`.
"""

import torch
from torch import nn

import ampscope

STEPS = 40
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device)
images, labels = torch.randn(256, 32, device=device), torch.randint(0, 10, (256,), device=device)

with ampscope.watch(model, optimizer, scaler, every=5, name="plain loop") as run:
    for step in range(STEPS):
        batch = torch.arange(step * 32, step * 32 + 32, device=device) % 256
        with torch.autocast(device, torch.float16):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

print(f"loss {loss.item():.3f}, loss scale {scaler.get_scale():g}, run {run.id} in {run.store}")
for alarm in run.alarms:
    print(f"step {alarm.step}: {alarm.text}")
