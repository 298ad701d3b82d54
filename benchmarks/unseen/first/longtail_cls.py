"""Long tailed classification, classes weighted by the counts seen so far."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class BalancedLoss(nn.Module):
    def __init__(self, classes, dtype=torch.bfloat16, power=1.0):
        super().__init__()
        self.power = power
        self.register_buffer("seen", torch.zeros(classes, dtype=dtype))

    def forward(self, logits, y):
        self.seen.index_add_(0, y, torch.ones_like(y, dtype=self.seen.dtype))
        weight = (self.seen.float() + 1) ** -self.power
        weight = weight / weight.mean()
        return F.cross_entropy(logits, y, weight=weight)


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, classes))
        self.criterion = BalancedLoss(classes)

    def forward(self, x, y=None):
        logits = self.body(x)
        return logits if y is None else self.criterion(logits.float(), y)


def draw(n, prior, centres, gen):
    y = torch.multinomial(prior, n, replacement=True, generator=gen)
    return centres[y] + 1.2 * torch.randn(n, centres.shape[1], generator=gen), y


def main():
    torch.manual_seed(27)
    gen = torch.Generator().manual_seed(270)
    classes = 6
    prior = torch.tensor([0.55, 0.25, 0.1, 0.06, 0.03, 0.01])
    centres = torch.randn(classes, 12, generator=gen)
    model = Classifier(classes)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(300):
        x, y = draw(128, prior, centres, gen)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        opt.step()
        if step % 60 == 59:
            with torch.no_grad():
                xt, yt = draw(3000, torch.ones(classes) / classes, centres, gen)
                pred = model(xt).argmax(1)
                recall = torch.stack([(pred[yt == c] == c).float().mean() for c in range(classes)])
            print(f"step {step + 1} loss {loss.item():.4f} recall {[round(r, 2) for r in recall.tolist()]}")
            print("  counts", model.criterion.seen.long().tolist())


main()
