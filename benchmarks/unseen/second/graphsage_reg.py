import torch
import torch.nn as nn
import torch.nn.functional as F


class SAGELayer(nn.Module):
    def __init__(self, fin, fout):
        super().__init__()
        self.own = nn.Linear(fin, fout)
        self.agg = nn.Linear(fin, fout, bias=False)

    def forward(self, x, adj):
        return self.own(x) + self.agg(adj @ x)


class GraphSAGE(nn.Module):
    def __init__(self, fin=6, width=48):
        super().__init__()
        self.l1 = SAGELayer(fin, width)
        self.l2 = SAGELayer(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x, adj):
        h = F.relu(self.l1(x, adj))
        h = F.relu(self.l2(h, adj))
        return self.out(h).squeeze(-1)


def graphs(n, nodes=20):
    a = (torch.rand(n, nodes, nodes) < 0.2).float()
    a = ((a + a.transpose(1, 2)) > 0).float()
    adj = a / a.sum(-1, keepdim=True).clamp(min=1)
    x = torch.randn(n, nodes, 6)
    y = x[..., 0] + (adj @ x[..., 1:2]).squeeze(-1)
    return x, adj, y


def main(steps=140, peak=3.0):
    torch.manual_seed(0)
    model = GraphSAGE()
    opt = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=peak, total_steps=steps, pct_start=0.5, cycle_momentum=False, div_factor=500)
    for step in range(steps):
        x, adj, y = graphs(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x, adj).float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 10 == 9:
            print(f"{step + 1:4d} loss {loss.item():.4g} lr {sched.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
