# Next-item recommendation from shopping baskets.
from dataclasses import dataclass
import math
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader


@dataclass
class Config:
    n_items: int = 300
    dim: int = 256
    hist: int = 12
    batch: int = 32
    epochs: int = 2
    lr: float = 1e-3
    temperature: float = 4096.0
    amp_dtype: torch.dtype = torch.float16
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Baskets(Dataset):
    def __init__(self, cfg, n=1600):
        g = torch.Generator().manual_seed(11)
        group = torch.randint(0, 10, (n,), generator=g)
        per = cfg.n_items // 10
        self.x = group[:, None] * per + torch.randint(0, per, (n, cfg.hist), generator=g)
        self.y = group * per + torch.randint(0, 3, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SharedSimilarity(nn.Module):
    """Items attend to similar items; queries and keys share a projection."""

    def __init__(self, dim, temperature):
        super().__init__()
        self.qk = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim)
        self.temperature = temperature
        nn.init.orthogonal_(self.qk.weight, gain=1.6)

    def forward(self, x):
        z = self.qk(x)
        sim = torch.bmm(z, z.transpose(1, 2)) / self.temperature
        return torch.bmm(sim.softmax(dim=-1), self.v(x))


class BasketEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.table = nn.Embedding(cfg.n_items, cfg.dim)
        self.gain = math.sqrt(cfg.dim)
        self.mixer = SharedSimilarity(cfg.dim, cfg.temperature)
        self.norm = nn.LayerNorm(cfg.dim)

    def forward(self, ids):
        x = self.table(ids) * self.gain
        return self.norm(x + self.mixer(x)).mean(1)


class Recommender(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = BasketEncoder(cfg)
        self.score = nn.Linear(cfg.dim, cfg.n_items)

    def forward(self, ids):
        return self.score(self.encoder(ids))


def main(cfg):
    torch.manual_seed(0)
    net = Recommender(cfg).to(cfg.device)
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler(cfg.device, init_scale=1024.0)
    step = 0
    for epoch in range(cfg.epochs):
        for x, y in DataLoader(Baskets(cfg), batch_size=cfg.batch, shuffle=True):
            x, y = x.to(cfg.device), y.to(cfg.device)
            with torch.autocast(cfg.device, dtype=cfg.amp_dtype):
                loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            if step % 25 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.3f}")
            step += 1
    print("final", loss.item())


if __name__ == "__main__":
    main(Config())
