"""The trainings of these scripts: two small nets, their data, one loop with autocast, compiled."""

import sys

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch.nn as nn
import torch.nn.functional as F

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
FAULTY = "--healthy" not in sys.argv
STEPS = 14
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    torch.set_default_device(DEVICE)
torch.manual_seed(SEED)
# Neither cache knows what a script changes in the compiler; kernels are known by their text.
functorch.enable_autograd_cache = False
inductor.fx_graph_cache = False
inductor.compile_threads = 1  # a pool of processes costs more than these few kernels
WIDTH = 32 + 8 * (SEED % 3)


class Block(nn.Module):
    """A residual block; ``act`` is what a script plants its fault in."""

    def __init__(self, width, act=None, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = act if act is not None else nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)
        for part in (self.up, self.down):
            nn.init.normal_(part.weight, std=0.3)

    def forward(self, x):
        return x + self.down(self.drop(self.act(self.up(self.norm(x)))))


class Classifier(nn.Module):
    """Features [batch, 16] -> logits [batch, 5]."""

    def __init__(self, *acts, dropout=0.0, width=WIDTH):
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, act, dropout) for act in acts or (None,))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Single-head attention over [batch, length, width], with a mask for padding."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        for part in (self.qkv, self.out):
            nn.init.normal_(part.weight, std=0.3)

    def forward(self, x, real):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~real[:, None, :], -1e4)
        return self.out(F.softmax(scores, -1) @ v)


class Tagger(nn.Module):
    """Tokens [batch, length] (0 is padding) -> logits [batch, 5]."""

    def __init__(self, words=300, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.attend = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.attend(x, tokens > 0))
        return self.head(x.mean(1))


def features(size=256):
    x = torch.randn(size, 16)
    return x, (x @ torch.randn(16, 5)).argmax(1)


def sentences(size=256, length=12, words=300):
    tokens = torch.randint(1, words, (size, length))
    tokens[:, length - 4 :] *= torch.rand(size, 4) < 0.5
    return tokens, tokens[:, :4].sum(1) % 5


def train(
    net, data, *, dtype=torch.bfloat16, lr=3e-3, batch=32, call=None, compiled=None, scale=1024.0
):
    """Adam under autocast; fp16 with a GradScaler. ``batch`` may be a list of sizes, in turn."""
    x, y = data
    sizes = batch if isinstance(batch, list) else [batch]
    model = torch.compile(net, **(compiled or {}))
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype is torch.float16, init_scale=scale)
    for step in range(STEPS):
        rows = torch.randint(0, len(x), (sizes[step % len(sizes)],))
        if call is not None:
            call(step)
        with torch.autocast(DEVICE, dtype=dtype):
            logits = model(x[rows])
            loss = F.cross_entropy(logits.float(), y[rows])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 8 == 0:
            print(step, round(loss.item(), 4))


def passes(**named):
    """Put functions into inductor's places for custom graph passes."""
    for name, function in named.items():
        setattr(inductor, name, function)
