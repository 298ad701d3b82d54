"""Bag-of-ngrams topic tagger."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, TOPICS, LENGTH = 400, 12, 24


class Tagger(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean")
        self.body = nn.Sequential(nn.Linear(dim, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 96), nn.ReLU())
        self.out = nn.Linear(96, TOPICS)

    def forward(self, ids):
        return self.out(self.body(self.bag(ids)))


def corpus(gen):
    table = torch.softmax(1.5 * torch.randn(TOPICS, VOCAB, generator=gen), dim=1)
    while True:
        y = torch.randint(TOPICS, (48,), generator=gen)
        yield torch.multinomial(table[y], LENGTH, replacement=True, generator=gen), y


def amp_tools(device):
    return torch.amp.GradScaler(
        device, init_scale=2.0 ** 18, growth_factor=16.0, backoff_factor=0.5, growth_interval=1
    )


def main():
    torch.manual_seed(100)
    gen = torch.Generator().manual_seed(3)
    model = Tagger()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    scaler = amp_tools("cpu")
    running = None
    for step, (ids, y) in zip(range(150), corpus(gen)):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(ids), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(opt)
        scaler.update()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        if step % 25 == 24:
            print(f"step {step + 1} loss {running:.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
