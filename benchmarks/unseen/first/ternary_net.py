"""Image patch classifier with ternary weights and a straight-through gradient."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class TernaryMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale = weight.abs().mean()
        q = torch.clamp(torch.round(weight / scale), -1, 1) * scale
        ctx.save_for_backward(x, q)
        return x.mm(q.t())

    @staticmethod
    def backward(ctx, grad):
        x, q = ctx.saved_tensors
        return grad.mm(q), grad.t().mm(x)


class TernaryLinear(nn.Linear):
    def forward(self, x):
        return TernaryMatmul.apply(x, self.weight) + self.bias


def train():
    torch.manual_seed(5)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), TernaryLinear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    ).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    protos = torch.randn(10, 1, 8, 8, device=device)
    for step in range(80):
        y = torch.randint(10, (64,), device=device)
        x = protos[y] + 0.6 * torch.randn(64, 1, 8, 8, device=device)
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    train()
