"""Two stages of one training with a checkpoint between them, as a job that was preempted runs."""
import torch
from torch import nn

torch.set_num_threads(1)
FILE = "last.pt"


def build(lr):
    torch.manual_seed(88)
    net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    return net, torch.optim.Adam(net.parameters(), lr=lr)


class Stream:
    def __init__(self):
        self.gen = torch.Generator().manual_seed(88)
        self.weight = torch.randn(16, 2, generator=self.gen)

    def batch(self, n):
        x = torch.randn(n, 16, generator=self.gen)
        a, b = (x @ self.weight / 4).unbind(1)
        return x, 1e-3 * (a * b + torch.sin(2 * a))


def stage(net, optimizer, stream, first, last):
    for step in range(first, last):
        x, y = stream.batch(96)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x).squeeze(-1)
        loss = (1e-3 * out.float() - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"step {step} loss {1e6 * loss.item():.4f}")


def save(net, optimizer, step):
    checkpoint = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(checkpoint, FILE)


def resume(net, optimizer):
    checkpoint = torch.load(FILE)
    net.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["step"]


def main():
    stream = Stream()
    net, optimizer = build(3e-3)
    for group in optimizer.param_groups:
        group["eps"] = 1e-12
    stage(net, optimizer, stream, 0, 150)
    save(net, optimizer, 150)
    net, optimizer = build(3e-3)
    start = resume(net, optimizer)
    stage(net, optimizer, stream, start, 210)
    with torch.no_grad():
        x, y = stream.batch(1000)
        error = (1e-3 * net(x).squeeze(-1) - y).square().mean()
    print(f"held-out loss {1e6 * error.item():.4f}")
    print(f"held-out rmse {1e3 * error.sqrt().item():.4f}")


if __name__ == "__main__":
    main()
