import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Restorer(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.a = nn.Conv2d(1, ch, 3, padding=1)
        self.b = nn.Conv2d(ch, ch, 3, padding=1)
        self.c = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x):
        h = F.silu(self.a(x))
        h = F.silu(self.b(h)) + h
        return torch.sigmoid(4 * self.c(h))


def total_variation(img):
    dx = img[:, :, :-1, 1:] - img[:, :, :-1, :-1]
    dy = img[:, :, 1:, :-1] - img[:, :, :-1, :-1]
    return torch.sqrt(dx * dx + dy * dy + 1e-8).mean()


def cartoons(n, size=28):
    clean = torch.zeros(n, 1, size, size)
    for i in range(n):
        for _ in range(3):
            r, c = torch.randint(0, size - 10, (2,)).tolist()
            clean[i, 0, r:r + 10, c:c + 10] = float(torch.rand(1)) * 0.8 + 0.2
    return clean, clean + 0.15 * torch.randn_like(clean)


net = Restorer()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for it in range(70):
    clean, noisy = cartoons(6)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(noisy)
        loss = F.mse_loss(out, clean) + 0.02 * total_variation(out)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 9:
        print(f"iter {it + 1:3d}  loss {loss.item():.5f}  scale {scaler.get_scale():g}")
