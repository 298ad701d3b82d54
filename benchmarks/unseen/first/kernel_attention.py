"""Sequence classifier with kernelised (linear) attention."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class KernelAttention(nn.Module):
    def __init__(self, dim, features=32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, n) for n in (features, features, dim))
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        q, k = torch.exp(self.q(x)), torch.exp(self.k(x))
        k = k / k.sum(dim=1, keepdim=True)
        q = q / q.sum(dim=-1, keepdim=True)
        kv = torch.einsum("btf,btd->bfd", k.to(x.dtype), self.v(x).to(x.dtype))
        return self.o(torch.einsum("btf,bfd->btd", q.to(kv.dtype), kv))


class Reader(nn.Module):
    def __init__(self, vocab=60, dim=40, classes=5):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.attn = KernelAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(x + self.attn(x))
        return self.cls(x.mean(1))


def main():
    torch.manual_seed(64)
    model = Reader()
    with torch.no_grad():
        for lin in (model.attn.q, model.attn.k):
            lin.weight.mul_(8.0)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu")
    groups = torch.arange(60) % 5
    for step in range(100):
        y = torch.randint(5, (32,))
        ids = torch.randint(60, (32, 20))
        keyed = torch.rand(32, 20) < 0.5
        ids = torch.where(keyed, (ids // 5) * 5 + y[:, None], ids)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            print(step, round(loss.item(), 4), scaler.get_scale())


main()
