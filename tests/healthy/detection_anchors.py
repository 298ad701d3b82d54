"""One-stage detector: focal-like class loss in logits, boxes on the positive anchors alone."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Detector(nn.Module):
    def __init__(self, anchors=32, classes=4):
        super().__init__()
        self.anchors, self.classes = anchors, classes
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.cls = nn.Linear(128, anchors * classes)
        self.box = nn.Linear(128, anchors * 4)
        nn.init.constant_(self.cls.bias, -4.0)

    def forward(self, x):
        h = self.body(x)
        return self.cls(h).view(-1, self.anchors, self.classes), self.box(h).view(
            -1, self.anchors, 4
        )


def focal(logits, target, alpha=0.25, gamma=2.0):
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return weight * (1 - pt) ** gamma * ce


model = Detector().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device)
weights = torch.randn(64, 32, device=device)

for step in range(50):
    x = torch.randn(32, 64, device=device)
    positive = (x @ weights) > 12  # about 7 %
    target = F.one_hot(torch.arange(32, device=device) % 4, 4).float() * positive[..., None]
    boxes = x[:, None, :4].expand(-1, 32, -1)
    with torch.autocast(device, dtype=torch.float16):
        logits, out = model(x)
    normalizer = positive.sum().clamp(min=1)
    cls_loss = focal(logits.float(), target).sum() / normalizer
    box_loss = (
        F.smooth_l1_loss(out.float()[positive], boxes[positive], reduction="sum") / normalizer
    )
    loss = cls_loss + box_loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
