import torch
import torch.nn as nn
import torch.nn.functional as F


class GridDetector(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, ch, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, stride=2, padding=1), nn.ReLU())
        self.score = nn.Conv2d(ch, 1, 1)
        self.size = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        h = self.body(x)
        return self.score(h).squeeze(1), self.size(h).squeeze(1)


def patches(n, density, g, cells=6):
    has = torch.rand(n, cells, cells, generator=g) < density
    size = 1 + 2 * torch.rand(n, cells, cells, generator=g)
    amp = (has * size).repeat_interleave(4, 1).repeat_interleave(4, 2)
    img = amp + 0.2 * torch.randn(n, cells * 4, cells * 4, generator=g)
    return img.unsqueeze(1), has, size


def detection_loss(score, size, has, true_size):
    obj = F.binary_cross_entropy_with_logits(score.float(), has.float())
    err = F.smooth_l1_loss(size.float(), true_size, reduction="none")
    box = (err * has).sum() / has.sum()
    return obj + box


def main(steps=120):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5)
    model = GridDetector()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        img, has, size = patches(4, 0.15 if step < 50 else 0.012, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            score, pred = model(img)
        loss = detection_loss(score, pred, has, size)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 14:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
