"""Classify nodes of a random community graph with attention over neighbours."""
import torch
from torch import nn
import torch.nn.functional as F

torch.set_num_threads(1)
NODES, CLASSES, FEATURES = 48, 3, 8


class GraphAttention(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)
        self.src = nn.Linear(cout, 1, bias=False)
        self.dst = nn.Linear(cout, 1, bias=False)

    def forward(self, x, adj):
        h = self.lin(x)
        e = F.leaky_relu(self.src(h) + self.dst(h).transpose(0, 1), 0.2)
        e = e.masked_fill(adj == 0, -3e4)  # isolated nodes average over everybody
        alpha = torch.softmax(e, dim=1)
        return alpha @ h


class GAT(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.gat1 = GraphAttention(FEATURES, hidden)
        self.skip = nn.Linear(FEATURES, hidden)
        self.gat2 = GraphAttention(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.cls = nn.Linear(hidden, CLASSES)

    def forward(self, x, adj):
        h = F.elu(self.gat1(x, adj))
        h = h + self.skip(x)
        h = self.norm(h)
        h = F.elu(self.gat2(h, adj))
        return self.cls(h)


def make_graph(g):
    y = torch.randint(CLASSES, (NODES,), generator=g)
    same = (y[:, None] == y[None, :]).float()
    adj = (torch.rand(NODES, NODES, generator=g) < 0.02 + 0.2 * same).float()
    adj[::7] = 0  # a few nodes are not connected yet
    x = CENTRES[y] + 1.2 * torch.randn(NODES, FEATURES, generator=g)
    labelled = torch.rand(NODES, generator=g) < 0.4
    return x, adj, y, labelled


def masked_nll(logits, y, mask):
    each = F.cross_entropy(logits, y, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


gen = torch.Generator().manual_seed(31)
CENTRES = torch.randn(CLASSES, FEATURES, generator=gen)
torch.manual_seed(31)
gnn = GAT()
opt = torch.optim.Adam(gnn.parameters(), lr=0.01, weight_decay=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)

for epoch in range(48):
    x, adj, y, labelled = make_graph(gen)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = gnn(x, adj)
        loss = masked_nll(scores.float(), y, labelled)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if epoch % 12 == 0:
        print("Epoch: {:03d}, Loss: {:.4f}".format(epoch, loss.item()))

total = 0.0
with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
    for _ in range(4):
        x, adj, y, labelled = make_graph(gen)
        total += F.cross_entropy(gnn(x, adj).float(), y).item() / 4
print("Test, Loss: {:.4f}".format(total))
