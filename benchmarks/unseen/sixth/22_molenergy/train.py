import argparse
import torch
from data import make_graphs
from model import AtomNet


def opts():
    p = argparse.ArgumentParser()
    p.add_argument("--hidden", type=int, default=48)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--graphs", type=int, default=8)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--no-amp", action="store_true")
    return p.parse_args()


def main():
    a = opts()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = AtomNet(a.hidden).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=a.lr)
    sch = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    mae, k = 0.0, 0
    for it in range(a.steps):
        g = {n: v.to(device) if torch.is_tensor(v) else v for n, v in make_graphs(a.graphs).items()}
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not a.no_amp):
            pred = net(g)
        err = (pred.float() - g["y"]) / g["sizes"]
        loss = err.abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sch.step()
        mae, k = mae + loss.item(), k + 1
        if (it + 1) % 40 == 0:
            print(f"{it + 1}: mae per atom {mae / k:.4f}")
            mae, k = 0.0, 0


if __name__ == "__main__":
    main()
