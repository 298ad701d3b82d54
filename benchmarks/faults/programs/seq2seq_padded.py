"""Encoder-decoder transformer that reverses sequences of different lengths."""
import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS = 0, 1
VOCAB, MAX_LEN, D_MODEL = 12, 7, 24
cfg = dict(lr=4e-3, warmup=5, steps=50, batch=12, seed=7, dtype=torch.float16)


def sinusoids(length, dim):
    pos = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    freq = torch.exp(-torch.arange(0, dim, 2, dtype=torch.float32) * (4.0 / dim))
    return torch.cat([torch.sin(pos * freq), torch.cos(pos * freq)], dim=1)


class MultiHead(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context, blocked):
        q, k, v = self.split(self.q(x)), self.split(self.k(context)), self.split(self.v(context))
        logits = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        logits = logits.masked_fill(blocked[:, None], -1e4)
        out = torch.softmax(logits, dim=-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, cross=False):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.self_attn = MultiHead(dim)
        self.cross = MultiHead(dim) if cross else None
        self.norm_c = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.wi = nn.Linear(dim, 2 * dim)
        self.wo = nn.Linear(2 * dim, dim)

    def forward(self, x, blocked, memory=None, memory_blocked=None):
        n = self.norm1(x)
        x = x + self.self_attn(n, n, blocked)
        if self.cross is not None:
            x = x + self.cross(self.norm_c(x), memory, memory_blocked)
        h = F.relu(self.wi(self.norm2(x)))
        return x + self.wo(h)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.register_buffer("pos", sinusoids(MAX_LEN + 1, D_MODEL))
        self.encoder = Layer(D_MODEL)
        self.decoder = Layer(D_MODEL, cross=True)
        self.final = nn.LayerNorm(D_MODEL)
        self.lm_head = nn.Linear(D_MODEL, VOCAB)

    def forward(self, src, tgt):
        pad = (src == PAD)[:, None, :]
        mem = self.embed(src) + self.pos[: src.shape[1]]
        mem = self.encoder(mem, pad.expand(-1, src.shape[1], -1))
        T = tgt.shape[1]
        future = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)[None]
        x = self.embed(tgt) + self.pos[:T]
        x = self.decoder(x, future, mem, pad.expand(-1, T, -1))
        return self.lm_head(self.final(x))


def batch(n, gen):
    lengths = torch.randint(0, MAX_LEN + 1, (n,), generator=gen)  # an empty line stays in
    src = torch.randint(2, VOCAB, (n, MAX_LEN), generator=gen)
    inside = torch.arange(MAX_LEN)[None] < lengths[:, None]
    src = torch.where(inside, src, PAD)
    index = (lengths[:, None] - 1 - torch.arange(MAX_LEN)[None]).clamp(min=0)
    label = torch.where(inside, src.gather(1, index), PAD)
    tgt = torch.cat([torch.full((n, 1), BOS), label[:, :-1]], dim=1)
    return src, tgt, label


def nll(logits, label):
    return F.cross_entropy(logits.reshape(-1, VOCAB), label.reshape(-1))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(cfg["seed"])
    gen = torch.Generator().manual_seed(cfg["seed"])
    net = Seq2Seq()
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / cfg["warmup"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
    for step in range(cfg["steps"]):
        src, tgt, label = batch(cfg["batch"], gen)
        with torch.autocast("cpu", dtype=cfg["dtype"]):
            out = net(src, tgt)
            loss = nll(out, label)
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        gnorm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 10 == 0:
            print(f"step={step} loss={loss.item():.3f} gnorm={gnorm:.2f}")
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=cfg["dtype"]):
        src, tgt, label = batch(64, gen)
        print(f"dev loss={nll(net(src, tgt), label).item():.3f}")


if __name__ == "__main__":
    main()
