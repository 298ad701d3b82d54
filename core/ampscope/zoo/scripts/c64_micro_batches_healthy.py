"""Regression with a large effective batch built from micro-batches."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
micro_batches = 4

model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
loss_fn = nn.MSELoss()
w = torch.randn(16, 1)

for update in range(40):
    optimizer.zero_grad()
    total = 0.0
    for k in range(micro_batches):
        x = torch.randn(32, 16)
        y = torch.sin(x @ w / 2)
        x, y = x.to(device), y.to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = loss_fn(model(x), y) / micro_batches
        scaler.scale(loss).backward()
        if k == micro_batches - 1:
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
        total += loss.item()
    if update % 8 == 0:
        print(f"update {update}: loss {total:.4f}, gradient norm {grad_norm.item():.4f}")
