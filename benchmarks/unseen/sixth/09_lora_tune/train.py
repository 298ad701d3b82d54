import torch
from torch import nn
import torch.nn.functional as F
from torch.amp import autocast, GradScaler

torch.manual_seed(0)
VOCAB, DIM, T = 50, 64, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.o = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(0.1 * torch.randn(T, DIM))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.lm_head(x)


class LoraLinear(nn.Module):
    def __init__(self, base, r=8, alpha=16):
        super().__init__()
        self.base = base
        w = base.weight
        self.A = nn.Parameter(torch.randn(r, w.shape[1], device=w.device, dtype=w.dtype) / r)
        self.B = nn.Parameter(w.new_zeros(w.shape[0], r))
        self.s = alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.A), self.B) * self.s


def inject(model, names=("qkv", "o")):
    for blk in model.blocks:
        for n in names:
            setattr(blk, n, LoraLinear(getattr(blk, n)))


def load_base():
    m = LM().half().cuda()
    for p in m.parameters():
        p.requires_grad_(False)
    return m


def seq(b):
    step = torch.randint(1, 5, (b, 1))
    s0 = torch.randint(0, VOCAB, (b, 1))
    return ((s0 + step * torch.arange(T + 1)) % VOCAB).cuda()


model = load_base()
inject(model)
model.lm_head.float()
for p in model.lm_head.parameters():
    p.requires_grad_(True)
params = [p for p in model.parameters() if p.requires_grad]
print("trainable", sum(p.numel() for p in params))
optimizer = torch.optim.AdamW(params, lr=3e-3)
scaler = GradScaler("cuda")
for it in range(200):
    s = seq(16)
    with autocast("cuda", dtype=torch.float16):
        logits = model(s[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), s[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(optimizer)
    scaler.update()
    if it % 40 == 39:
        print(it, loss.item())
