"""Latent cross-attention over unordered measurement sets."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CrossAttention(nn.Module):
    def __init__(self, dim, ctx_dim, heads=2, dim_head=64):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(ctx_dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim)
        self.out_norm = nn.LayerNorm(inner)

    def forward(self, latents, ctx):
        b = latents.shape[0]
        q = self.to_q(self.norm(latents))
        k, v = self.to_kv(ctx).chunk(2, dim=-1)
        q, k, v = (t.view(b, -1, self.heads, t.shape[-1] // self.heads) for t in (q, k, v))
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2)
        return latents + self.to_out(self.out_norm(out.float()))


class SetClassifier(nn.Module):
    def __init__(self, ctx_dim=6, dim=48, n_latents=6, classes=4, depth=2):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(n_latents, dim))
        self.layers = nn.ModuleList(CrossAttention(dim, ctx_dim) for _ in range(depth))
        self.ff = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, ctx):
        z = self.latents.expand(ctx.shape[0], -1, -1)
        for attn, ff in zip(self.layers, self.ff):
            z = attn(z, ctx)
            z = z + ff(z)
        return self.head(z.mean(1))


def sample(n, gen):
    y = torch.randint(4, (n,), generator=gen)
    centre = torch.tensor([[1., 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1]])
    pts = torch.randn(n, 20, 6, generator=gen) + 1.5 * centre[y][:, None]
    return pts * 5000.0, y


torch.manual_seed(0)
gen = torch.Generator().manual_seed(1)
model = SetClassifier()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for it in range(80):
    ctx, y = sample(24, gen)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(ctx), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 10 == 0:
        print(it, round(loss.item(), 4), scaler.get_scale())
