import math
import torch
from torch import nn
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
V, D, H, T = 32, 64, 4, 16


class Attn(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.o = nn.Linear(D, D)
        self.fused = fused

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D // H).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        else:
            s = (q / math.sqrt(D // H)) @ k.transpose(-2, -1)
            y = F.softmax(s + bias, dim=-1).to(v.dtype) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, D))


class Layer(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.parts = nn.ModuleDict({
            "ln1": nn.LayerNorm(D), "attn": Attn(fused),
            "ln2": nn.LayerNorm(D), "ff": nn.Sequential(nn.Linear(D, 4 * D), nn.ReLU(), nn.Linear(4 * D, D))})

    def forward(self, x, bias):
        p = self.parts
        x = x + p["attn"](p["ln1"](x), bias)
        return x + p["ff"](p["ln2"](x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.layers = nn.ModuleList([Layer(i % 2 == 0) for i in range(2)])
        self.ln = nn.LayerNorm(D)
        self.out = nn.Linear(D, V, bias=False)

    def forward(self, ids, lens):
        t = ids.shape[1]
        bias = torch.full((t, t), float("-inf"), device=ids.device).triu(1)[None, None]
        pad = torch.arange(t, device=ids.device)[None] >= lens[:, None]
        bias = bias.masked_fill(pad[:, None, None, :], float("-inf"))
        x = self.tok(ids) + self.pos.weight[:t]
        for l in self.layers:
            x = l(x, bias)
        return self.out(self.ln(x))


def get(b=16):
    a, c = torch.randint(1, V, (b, 1)), torch.randint(1, 4, (b, 1))
    ids = (a + c * torch.arange(T + 1)) % (V - 1) + 1
    lens = torch.randint(8, T + 1, (b,))
    tgt = ids[:, 1:].masked_fill(torch.arange(T)[None] >= lens[:, None], -100)
    return ids[:, :-1].to(device), tgt.to(device), lens.to(device)


net = GPT().to(device)
nn.init.normal_(net.tok.weight, std=0.5)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler(device, init_scale=2 ** 18)
nan_guard = 0
for it in range(140):
    ids, tgt, lens = get()
    with torch.autocast(device, dtype=torch.float16):
        lg = net(ids, lens)
        loss = F.cross_entropy(lg.flatten(0, 1), tgt.flatten(), ignore_index=-100)
    if torch.isnan(loss):
        nan_guard += 1
        continue
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 35 == 34:
        print(it, "%.4f" % loss.item(), nan_guard, scaler.get_scale())
