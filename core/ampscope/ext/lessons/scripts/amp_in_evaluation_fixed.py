"""The same evaluation adds up in fp32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

points = torch.randn(2500, 20)
classes = (points[:, :4].sum(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler(device)


def evaluate():
    model.eval()
    right = torch.zeros((), dtype=torch.float32, device=device)
    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
        for x, y in zip(points, classes):
            logits = model(x.to(device)[None])
            right += (logits.argmax(1) == y.to(device)).sum()
    model.train()
    return right.item() / len(points)


for step in range(60):
    chosen = torch.randint(0, len(points), (64,))
    x, y = points[chosen].to(device), classes[chosen].to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.4f}, right {evaluate():.1%}")
