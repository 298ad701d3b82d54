import torch
import torch.nn as nn
import torch.nn.functional as F


class Trunk(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a = nn.Linear(10, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        return F.silu(self.b(F.silu(self.a(x))))


class Perception(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.label = nn.Linear(64, 3)
        self.depth = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        h = self.trunk(x)
        return self.label(h), self.depth(h).squeeze(-1)


def sample(n, w):
    x = torch.randn(n, 10)
    return x, (x @ w).argmax(1), 1.5 * x[:, 0] + torch.relu(x[:, 1])


def train_step(model, opt, scaler, batch):
    x, label, depth = batch
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits, d = model(x)
        loss_label = F.cross_entropy(logits, label)
        loss_depth = F.mse_loss(d, depth)
    scaler.scale(loss_label).backward(retain_graph=True)
    loss_depth.backward()
    scaler.step(opt)
    scaler.update()
    return loss_label.item(), loss_depth.item()


def main():
    torch.manual_seed(0)
    w = torch.randn(10, 3)
    model = Perception()
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
    hist = []
    for it in range(240):
        hist.append(train_step(model, opt, scaler, sample(128, w)))
        if it % 40 == 39:
            a, b = torch.tensor(hist[-40:]).mean(0).tolist()
            print(f"iter {it + 1} label {a:.4f} depth {b:.4f} total {a + b:.4f}")


if __name__ == "__main__":
    main()
