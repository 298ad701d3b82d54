"""LoRA adapters on a frozen random backbone; gradients flow through adapters and head alone."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        update = self.up(self.down(x))
        return self.base(x) + self.scaling * update


class Backbone(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(12, dim)
        self.blocks = nn.ModuleList(LoRALinear(nn.Linear(dim, dim)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 4)
        for p in self.inp.parameters():
            p.requires_grad_(False)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for block in self.blocks:
            h = h + F.gelu(block(h))
        h = self.norm(h)
        return self.head(h)


def get_data(n, g):
    y = torch.randint(4, (n,), generator=g)
    x = torch.randn(n, 12, generator=g)
    x[:, 0] += (y % 2) * 2 - 1
    x[:, 1] += (y // 2) * 2 - 1
    x[:, 2] += 1.5 * (y == 3)
    return x, y


def run(max_steps=64, lr=6e-3, bs=32, seed=23):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    model = Backbone()
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in trainable)} trainable parameters")
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(max_steps):
        x, y = get_data(bs, g)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 16 == 0:
            print(f"{step=} loss={loss.item():.4f}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        x, y = get_data(256, g)
        print(f"eval loss={F.cross_entropy(model(x), y).item():.4f}")


if __name__ == "__main__":
    run()
