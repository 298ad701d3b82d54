"""GIoU loss on boxes in pixels; some images hold no object and add nothing."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def giou(a, b):
    lt, rb = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(1)
    area = lambda t: (t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])
    union = area(a) + area(b) - inter
    lt, rb = torch.min(a[:, :2], b[:, :2]), torch.max(a[:, 2:], b[:, 2:])
    hull = (rb - lt).clamp(min=0).prod(1)
    return inter / union.clamp(min=1e-6) - (hull - union) / hull.clamp(min=1e-6)


model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)

for step in range(60):
    x = torch.rand(64, 32, device=device)
    centre, size = 200 + 400 * x[:, :2], 40 + 200 * x[:, 2:4]
    true = torch.cat([centre - size / 2, centre + size / 2], 1)
    has_object = torch.rand(64, device=device) > 0.3
    if step % 7 == 3:
        has_object[:] = False
    with torch.autocast(device, dtype=torch.float16):
        out = model(x)
    out = out.float()
    c, s = 400 + 200 * out[:, :2], 100 * torch.nn.functional.softplus(out[:, 2:])
    boxes = torch.cat([c - s / 2, c + s / 2], 1)
    per_box = 1 - giou(boxes[has_object], true[has_object])
    loss = per_box.sum() / has_object.sum().clamp(min=1)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
