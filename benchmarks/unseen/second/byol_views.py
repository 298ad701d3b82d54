import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


def encoder(fin=20, width=64, out=16):
    return nn.Sequential(nn.Linear(fin, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.05), nn.Linear(width, out))


class Byol:
    def __init__(self, decay=0.99):
        self.online = encoder()
        self.predict = nn.Linear(16, 16)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.decay = decay

    def parameters(self):
        return list(self.online.parameters()) + list(self.predict.parameters())

    def loss(self, a, b):
        p = F.normalize(self.predict(self.online(a)).float(), dim=-1)
        with torch.no_grad():
            z = F.normalize(self.target(b).float(), dim=-1)
        return 2 - 2 * (p * z).sum(-1).mean()

    @torch.no_grad()
    def move(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(o, 1 - self.decay)


def views(n, centers):
    x = centers[torch.randint(len(centers), (n,))]
    return x + 0.3 * torch.randn_like(x), x + 0.3 * torch.randn_like(x)


def main(steps=240, warm=100):
    torch.manual_seed(0)
    centers = torch.randn(12, 20)
    byol = Byol()
    opt = torch.optim.AdamW(byol.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: max(1e-5, min(1.0, s / warm) ** 3))
    scaler = torch.amp.GradScaler("cpu")
    for s in range(steps):
        a, b = views(128, centers)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 0.5 * (byol.loss(a, b) + byol.loss(b, a))
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        byol.move()
        if s % 30 == 29:
            print(f"step {s + 1} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
