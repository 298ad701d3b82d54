"""Accumulation over windows of different length, the last one cut short by the end of the data."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)
x = torch.randn(350, 20, device=device)
y = (x @ torch.randn(20, 5, device=device)).argmax(1)

for epoch in range(6):
    batches = torch.randperm(350, device=device).split(16)
    for i, idx in enumerate(batches):
        last = i + 1 == len(batches)
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x[idx]), y[idx]) / 4
        scaler.scale(loss).backward()
        if (i + 1) % 4 == 0 or last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    print(epoch, loss.item() * 4)
