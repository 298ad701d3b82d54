"""Patch-based binary segmentation with a soft dice loss."""

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, PATCH = 320, 16


class PatchSegmenter(nn.Module):
    """Cuts the image into patches, maps each to a patch of logits."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(PATCH * PATCH, 32)
        self.decode = nn.Linear(32, PATCH * PATCH)

    def forward(self, image):
        n = image.shape[0]
        g = SIZE // PATCH
        x = image.view(n, g, PATCH, g, PATCH).permute(0, 1, 3, 2, 4).flatten(3)
        x = self.decode(torch.relu(self.encode(x)))
        return x.view(n, g, g, PATCH, PATCH).permute(0, 1, 3, 2, 4).reshape(n, SIZE, SIZE)


def dice_loss(logits, target, smooth=1.0):
    probs = torch.sigmoid(logits)
    target = target.type_as(probs)
    intersection = (probs * target).sum()
    cardinality = probs.sum() + target.sum()
    return 1.0 - (2.0 * intersection + smooth) / (cardinality + smooth)


def make_scene():
    """Images with a bright band per patch row; the mask marks it."""
    mask = (torch.arange(PATCH) < PATCH - 5).float().repeat(SIZE // PATCH)
    mask = mask[:, None].expand(SIZE, SIZE)
    mask = mask.expand(2, SIZE, SIZE).contiguous()
    return mask + 0.3 * torch.randn(2, SIZE, SIZE), mask


model = PatchSegmenter().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device)

for step in range(25):
    image, mask = make_scene()
    image, mask = image.to(device), mask.to(device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        logits = model(image)
        loss = dice_loss(logits, mask)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step:2d}  dice loss {loss.item():.4f}")
