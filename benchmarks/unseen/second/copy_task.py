import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedCell(nn.Module):
    def __init__(self, fin, dim):
        super().__init__()
        self.gate = nn.Linear(fin + dim, dim)
        self.cand = nn.Linear(fin + dim, dim)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x, h):
        xh = torch.cat([x, h], -1)
        z = torch.sigmoid(self.gate(xh))
        return (1 - z) * h + z * torch.tanh(self.cand(xh))


class FirstSymbol(nn.Module):
    def __init__(self, symbols=6, dim=48):
        super().__init__()
        self.emb = nn.Embedding(symbols + 1, 16)
        self.cell = GatedCell(16, dim)
        self.head = nn.Linear(dim, symbols)
        self.dim = dim

    def forward(self, seq):
        h = torch.zeros(seq.shape[0], self.dim)
        for t in range(seq.shape[1]):
            h = self.cell(self.emb(seq[:, t]), h)
        return self.head(h)


def main(steps=180):
    torch.manual_seed(0)
    model = FirstSymbol()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    for s in range(steps):
        y = torch.randint(6, (48,))
        seq = torch.full((48, 8), 6)
        seq[:, 0] = y
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(seq)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if s % 20 == 19:
            print(f"step {s + 1} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
