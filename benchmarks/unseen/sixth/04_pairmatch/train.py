import math
import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class CrossMatch(nn.Module):
    """keypoint descriptors of image A look up the ones of image B"""

    def __init__(self, dim, heads, temp=0.02):
        super().__init__()
        self.h, self.dk = heads, dim // heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.ModuleDict({"k": nn.Linear(dim, dim, bias=False), "v": nn.Linear(dim, dim, bias=False)})
        self.proj = nn.Linear(dim, dim)
        self.temp = temp

    def split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.h, self.dk).transpose(1, 2)

    def forward(self, a, b):
        q, k, v = self.split(self.to_q(a)), self.split(self.to_kv["k"](b)), self.split(self.to_kv["v"](b))
        sim = q @ k.transpose(-2, -1)
        att = (sim * (self.temp / self.dk / math.sqrt(self.dk))).softmax(-1)
        o = (att @ v).transpose(1, 2).flatten(2)
        return self.proj(o)


class Matcher(nn.Module):
    def __init__(self, dim=128, layers=2):
        super().__init__()
        self.layers = nn.ModuleList([CrossMatch(dim, 2) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, 2)

    def forward(self, a, b):
        for l, n in zip(self.layers, self.norms):
            a = a + 50 * n(l(a, b))
        return self.head(a / 50)


def sift_like(n):
    # SIFT style descriptors, integer bins up to 255
    base = torch.rand(n, 24, 128).pow(3) * 255
    pos = torch.rand(n, 24, 2) * 2 - 1
    b = base.clone()
    b[..., :2] = 128 + 100 * pos
    perm = torch.stack([torch.randperm(24) for _ in range(n)])
    a = torch.gather(base, 1, perm[..., None].expand(-1, -1, 128)) + 4 * torch.randn(n, 24, 128)
    tgt = torch.gather(pos, 1, perm[..., None].expand(-1, -1, 2))
    a[..., :2] = 128 + 100 * (0.6 * tgt + 0.2 * torch.randn_like(tgt))
    return a, b, tgt


net = Matcher().to(device)
opt = torch.optim.AdamW(net.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler(device)
ema = None
for step in range(150):
    a, b, t = (z.to(device) for z in sift_like(16))
    with torch.autocast(device, dtype=torch.float16):
        out = net(a, b)
        loss = F.mse_loss(out.float(), t)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
    if step % 25 == 24:
        print("step", step, "loss", round(ema, 4), "scale", scaler.get_scale())
