import torch

E0 = torch.tensor([0.6, 1.0, 1.3, 0.8])


def make_graphs(n, lo=150, hi=900):
    sizes = torch.randint(lo, hi, (n,))
    graph = torch.repeat_interleave(torch.arange(n), sizes)
    frac = torch.rand(n, 4) + 0.2
    z = torch.multinomial(frac, hi, replacement=True)
    z = torch.cat([z[i, :s] for i, s in enumerate(sizes.tolist())])
    env = torch.randn(len(z), 3)
    e = E0[z] + 0.1 * torch.tanh(env[:, 0] * env[:, 1])
    y = torch.zeros(n).index_add_(0, graph, e)
    return {"z": z, "env": env, "graph": graph, "n": n, "sizes": sizes, "y": y}
