"""One-object detector on small images: class, box and objectness heads, weighted losses."""
import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {"batch": 12, "steps": 48, "lr": 4e-3, "box_weight": 2.0, "obj_weight": 1.0, "seed": 61}


class Trunk(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ch, 3, stride=2, padding=1)
        self.gn1 = nn.GroupNorm(2, ch)
        self.conv2 = nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1)
        self.gn2 = nn.GroupNorm(2, 2 * ch)

    def forward(self, img):
        f = F.silu(self.gn1(self.conv1(img)))
        f = F.silu(self.gn2(self.conv2(f)))
        return f.flatten(1)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.neck = nn.Linear(144, 32)
        self.cls_head = nn.Linear(32, 2)
        self.box_head = nn.Linear(32, 4)
        self.obj_head = nn.Linear(32, 1)

    def forward(self, img):
        f = F.relu(self.neck(self.trunk(img)))
        return self.cls_head(f), self.box_head(f), self.obj_head(f).squeeze(-1)


def scenes(n, g):
    there = torch.rand(n, generator=g) < 0.7
    kind = torch.randint(2, (n,), generator=g)
    centre = torch.rand(n, 2, generator=g) * 6 + 3
    half = torch.rand(n, 2, generator=g) * 1.5 + 1
    axis = torch.arange(12.0)
    inx = (axis[None] - centre[:, :1]).abs() <= half[:, :1]
    iny = (axis[None] - centre[:, 1:]).abs() <= half[:, 1:]
    sign = (kind * 2 - 1).float()
    img = (inx[:, None, :] & iny[:, :, None]).float() * sign[:, None, None] * there[:, None, None]
    img = img + 0.2 * torch.randn(n, 12, 12, generator=g)
    return img[:, None], kind, torch.cat([centre / 12, half / 12], 1), there.float()


def detection_loss(out, kind, box, there):
    cls, reg, obj = out
    objectness = F.binary_cross_entropy_with_logits(obj.float(), there)
    found = there.sum()
    cls_loss = (F.cross_entropy(cls.float(), kind, reduction="none") * there).sum() / found.clamp(min=1)
    box_loss = (F.smooth_l1_loss(reg.float(), box, reduction="none").sum(1) * there).sum() / found.clamp(min=1)
    return cls_loss + CONFIG["box_weight"] * box_loss + CONFIG["obj_weight"] * objectness


def main():
    torch.set_num_threads(1)
    torch.manual_seed(CONFIG["seed"])
    g = torch.Generator().manual_seed(CONFIG["seed"])
    detector = Detector()
    optimizer = torch.optim.AdamW(detector.parameters(), lr=CONFIG["lr"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(CONFIG["steps"]):
        img, kind, box, there = scenes(CONFIG["batch"], g)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = detector(img)
            loss = detection_loss(out, kind, box, there)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 12 == 0:
            print(f"step {step} total loss {loss.item():.4f}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        img, kind, box, there = scenes(96, g)
        print(f"val loss {detection_loss(detector(img), kind, box, there).item():.4f}")


if __name__ == "__main__":
    main()
