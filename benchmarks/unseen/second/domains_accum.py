import torch
import torch.nn as nn
import torch.nn.functional as F

DOMAINS = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.domain = nn.Embedding(DOMAINS, 16)
        self.net = nn.Sequential(nn.Linear(8 + 16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))

    def forward(self, x, d):
        return self.net(torch.cat([x, self.domain(d)], -1))


def microbatch(domain, rules, n=32):
    x = torch.randn(n, 8)
    return x, torch.full((n,), domain), (x @ rules[domain]).argmax(1)


@torch.no_grad()
def evaluate(model, rules):
    model.eval()
    out = [F.cross_entropy(model(x, d), y).item() for x, d, y in (microbatch(k, rules, 256) for k in range(DOMAINS))]
    model.train()
    return sum(out) / len(out)


def main(epochs=120):
    torch.manual_seed(0)
    rules = torch.randn(DOMAINS, 8, 3)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
    for epoch in range(epochs):
        opt.zero_grad()
        norms = []
        for k in range(DOMAINS):
            x, d, y = microbatch(k, rules)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x, d), y) / DOMAINS
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 2.0).item())
            if k == DOMAINS - 1:
                scaler.step(opt)
            scaler.update()
        if epoch % 20 == 19:
            print(f"window {epoch + 1} val {evaluate(model, rules):.4f} norm {sum(norms) / len(norms):.3f}")


if __name__ == "__main__":
    main()
