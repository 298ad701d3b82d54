"""Segmentation with borders labelled 255 and with a soft Dice loss in fp32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Conv2d(8, 3, 1),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)

for step in range(30):
    x = torch.randn(4, 3, 12, 12, device=device)
    y = x.argmax(1)
    y[:, 0, :] = y[:, -1, :] = y[:, :, 0] = y[:, :, -1] = 255
    with torch.autocast(device, dtype=torch.float16):
        logits = model(x)
        ce = F.cross_entropy(logits, y, ignore_index=255)
    with torch.autocast(device, enabled=False):
        valid = (y != 255).float()[:, None]
        p = logits.float().softmax(1) * valid
        t = F.one_hot(y.clamp(max=2), 3).permute(0, 3, 1, 2).float() * valid
        dice = 1 - (2 * (p * t).sum((0, 2, 3)) + 1) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1)
    loss = ce + dice.mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(step, loss.item())
