import copy
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(2)
V, D, T = 40, 64, 20


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.tm = nn.Conv1d(D, D, 4, padding=3, groups=D)
        self.fc = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x):
        h = self.tm(self.norm(x).transpose(1, 2))[..., :x.shape[1]].transpose(1, 2)
        return x + self.fc(h)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = checkpoint(l, x, use_reentrant=False)
        return self.head(x)


class MasterAdamW:
    def __init__(self, model, lr):
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float().requires_grad_() for p in self.live]
        self.inner = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.01)

    def zero_grad(self):
        for p in self.live:
            p.grad = None

    def step(self, max_norm=1.0):
        for m, p in zip(self.master, self.live):
            m.grad = p.grad.float()
        n = nn.utils.clip_grad_norm_(self.master, max_norm)
        self.inner.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.live):
                p.copy_(m)
        return n


def batch(b=24):
    x = torch.randint(0, V, (b, T + 1))
    for t in range(2, T + 1):
        x[:, t] = (x[:, t - 1] + x[:, t - 2] * 3 + 1) % V
    return x.to(device)


def main():
    torch.manual_seed(4)
    model = LM()
    model = model.to(device)
    opt = None
    fp32 = copy.deepcopy(model)
    model = model.to(torch.bfloat16)
    opt = MasterAdamW(model, lr=1.5e-3)
    for m, p in zip(opt.master, fp32.parameters()):
        m.data.copy_(p.data)
    run = None
    for it in range(220):
        s = batch()
        loss = F.cross_entropy(model(s[:, :-1]).float().flatten(0, 1), s[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        gn = opt.step()
        run = loss.item() if run is None else 0.95 * run + 0.05 * loss.item()
        if it % 40 == 39:
            print(f"iter {it} loss {run:.4f} gnorm {float(gn):.3f} {next(model.parameters()).dtype}")


main()
