"""A causal language model with gradient checkpointing, packed sequences and label smoothing."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2, self.heads = nn.LayerNorm(d), nn.LayerNorm(d), heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab=40, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(32, d)
        self.blocks = nn.ModuleList(Block(d, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids, document):
        t = ids.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=ids.device).tril()
        mask = (causal & (document[:, :, None] == document[:, None, :]))[:, None]
        x = self.tok(ids) + self.pos.weight[:t]
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return self.head(self.norm(x))


model = GPT().to(device)
for p in model.parameters():
    if p.dim() > 1:
        nn.init.normal_(p, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(device)

for step in range(40):
    start = torch.randint(0, 40, (8, 1), device=device)
    ids = (start + torch.arange(33, device=device)) % 40
    document = (torch.arange(32, device=device) >= 20).long().expand(8, -1)  # two documents a row
    labels = ids[:, 1:].clone()
    labels[:, 19] = -100
    with torch.autocast(device, dtype=torch.float16):
        logits = model(ids[:, :-1], document)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1
        )
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
