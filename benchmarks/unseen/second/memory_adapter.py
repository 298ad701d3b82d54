import torch
import torch.nn as nn
import torch.nn.functional as F


class ProjectFn(torch.autograd.Function):
    """Linear projection that keeps only its inputs and recomputes the rest."""

    @staticmethod
    def forward(ctx, x, weight, mask):
        ctx.save_for_backward(x, weight, mask)
        return (x * mask) @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight, mask = ctx.saved_tensors
        gx = (grad @ weight) * mask
        gw = grad.reshape(-1, grad.shape[-1]).t() @ (x * mask).reshape(-1, x.shape[-1])
        return gx, gw, None


class MaskedProjection(nn.Module):
    def __init__(self, fin, fout, keep=0.9):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fout, fin))
        nn.init.xavier_uniform_(self.weight)
        self.keep = keep

    def forward(self, x):
        mask = torch.ones(x.shape[-1])
        if self.training:
            mask = (torch.rand(x.shape[-1]) < self.keep).float() / self.keep
        return ProjectFn.apply(x, self.weight, mask)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 64)
        self.adapter = MaskedProjection(64, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        h = F.gelu(self.stem(x))
        h = h.float()
        return self.head(F.gelu(self.adapter(h)))


def main():
    torch.manual_seed(0)
    model = Net()
    centers = torch.randn(5, 16)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for step in range(150):
        y = torch.randint(5, (64,))
        x = centers[y] + torch.randn(64, 16)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 30 == 29:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
