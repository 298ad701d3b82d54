"""Node classification with a sum aggregator on a graph with a few hubs."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class SumConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.message = nn.Linear(d_in, d_out)
        self.update = nn.Linear(d_in, d_out)
        self.norm = nn.LayerNorm(d_out)

    def forward(self, x, edges):
        src, dst = edges
        msg = F.relu(self.message(x))[src]
        total = torch.zeros(x.shape[0], msg.shape[1], dtype=msg.dtype).index_add(0, dst, msg)
        return self.norm(self.update(x) + total)


class GraphNet(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.conv1 = SumConv(d_in, hidden)
        self.conv2 = SumConv(hidden, hidden)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x, edges):
        x = F.relu(self.conv1(x, edges))
        x = F.relu(self.conv2(x, edges))
        return self.classify(x)


def build_graph(nodes=600, classes=5, seed=12):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (nodes,), generator=g)
    centres = torch.randn(classes, 16, generator=g)
    x = 40 * (centres[y] + 0.4 * torch.randn(nodes, 16, generator=g))
    src = torch.randint(nodes, (3000,), generator=g)
    dst = torch.randint(nodes, (3000,), generator=g)
    hub_src = torch.randint(nodes, (6000,), generator=g)
    hub_dst = torch.randint(2, (6000,), generator=g)
    edges = torch.stack([torch.cat([src, hub_src]), torch.cat([dst, hub_dst])])
    return x, edges, y


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, edges, y = (t.to(device) for t in build_graph())
    train_mask = torch.rand(len(y), device=device) < 0.6
    net = GraphNet(16, 32, 5).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=5e-4)
    scaler = torch.amp.GradScaler(device.type)
    for epoch in range(40):
        net.train()
        opt.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            out = net(x, edges)
            loss = F.cross_entropy(out[train_mask], y[train_mask])
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if epoch % 8 == 7:
            net.eval()
            with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
                acc = (net(x, edges).argmax(1) == y)[~train_mask].float().mean()
            print(f"epoch {epoch + 1} loss {loss.item():.4f} val acc {acc.item():.3f}")


if __name__ == "__main__":
    main()
