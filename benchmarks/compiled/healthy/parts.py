"""What these trainings share: small nets, data that can be learnt, one loop under autocast."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    torch.set_default_device(DEVICE)
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = 16
WORDS = 40


class Attention(nn.Module):
    """Causal self-attention over [batch, length, width]."""

    def __init__(self, width, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a net of two layers, each behind a norm."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width, dropout=dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, words]."""

    def __init__(self, width=32, layers=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolutions(nn.Module):
    """Pictures [batch, 3, 16, 16] -> logits [batch, 4]."""

    def __init__(self, width=8):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def mlp(inputs=16, width=32, outputs=4):
    """Features [batch, inputs] -> [batch, outputs]."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, outputs)
    )


def sentences(count=16, length=16):
    """Tokens whose next one is known from the one before, but for some."""
    tokens = torch.randint(0, WORDS, (count, 1))
    while tokens.shape[1] <= length:
        tokens = torch.cat([tokens, (tokens[:, -1:] * 7 + 3) % WORDS], 1)
    return tokens[:, :-1], tokens[:, 1:]


def pictures(count=16):
    """Pictures and which quarter of them is bright."""
    y = torch.randint(0, 4, (count,))
    x = 0.3 * torch.randn(count, 3, 16, 16)
    for n, which in enumerate(y.tolist()):
        x[n, :, 8 * (which // 2) : 8 * (which // 2) + 8, 8 * (which % 2) : 8 * (which % 2) + 8] += 1
    return x, y


def features(count=32, inputs=16):
    """Features and a class that a linear rule gives."""
    x = torch.randn(count, inputs)
    return x, x[:, :4].argmax(1)


def cross_entropy(logits, y):
    return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())


def train(
    model, data, parameters, *, dtype=torch.bfloat16, steps=STEPS, lr=3e-3, loss_of=cross_entropy
):
    """AdamW under autocast; with a GradScaler in fp16."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype is torch.float16, init_scale=2.0**10)
    for step in range(steps):
        x, y = data()
        with torch.autocast(DEVICE, dtype=dtype):
            loss = loss_of(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        tell(step, loss)


def tell(step, loss):
    if step % 5 == 0 or step == STEPS - 1:
        print(step, round(float(loss), 4))


__all__ = [
    "DEVICE", "GPT", "STEPS", "WORDS", "Attention", "Block", "Convolutions", "F",
    "cross_entropy", "features", "math", "mlp", "nn", "pictures", "sentences", "tell", "torch",
    "train",
]  # fmt: skip
