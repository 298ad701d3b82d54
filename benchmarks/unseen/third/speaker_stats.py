# x-vector style speaker identification on filterbank frames
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_corpus(n=1600, speakers=8, bands=20, frames=40, seed=9):
    g = torch.Generator().manual_seed(seed)
    who = torch.randint(0, speakers, (n,), generator=g)
    timbre = torch.rand(speakers, bands, generator=g) * 2 + 0.2
    x = torch.randn(n, bands, frames, generator=g) * timbre[who].unsqueeze(-1)
    recorder = (torch.rand(n, generator=g) < 0.15).float()
    level = 10.0 + 990.0 * recorder
    return TensorDataset(x * level[:, None, None], who)


class Moments(nn.Module):
    def forward(self, h):
        return torch.cat([h.mean(dim=-1), h.var(dim=-1)], dim=-1)


class XVector(nn.Module):
    def __init__(self, bands=20, ch=32, speakers=8):
        super().__init__()
        self.frame = nn.ModuleDict({
            "tdnn1": nn.Conv1d(bands, ch, 5, padding=2),
            "tdnn2": nn.Conv1d(ch, ch, 3, padding=1),
        })
        self.segment = nn.ModuleDict({"stats": Moments(), "norm": nn.LayerNorm(2 * ch), "fc": nn.Linear(2 * ch, 64)})
        self.classify = nn.Linear(64, speakers)

    def forward(self, x):
        h = torch.relu(self.frame["tdnn1"](x))
        h = torch.relu(self.frame["tdnn2"](h))
        s = self.segment["norm"](self.segment["stats"](h))
        return self.classify(torch.relu(self.segment["fc"](s)))


class Trainer:
    def __init__(self, model, data, precision="fp16"):
        self.model, self.loader = model, DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
        self.opt = torch.optim.Adam(model.parameters(), lr=1.5e-3)
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=precision == "fp16")
        self.crit = nn.CrossEntropyLoss()

    def step(self, x, y):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.crit(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    def fit(self, epochs):
        for e in range(epochs):
            hist = [self.step(x, y) for x, y in self.loader]
            print(f"epoch {e} first {hist[0]:.3f} last {hist[-1]:.3f} mean {sum(hist) / len(hist):.3f}")


if __name__ == "__main__":
    torch.manual_seed(1)
    Trainer(XVector(), make_corpus()).fit(3)
