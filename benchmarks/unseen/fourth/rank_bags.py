"""Listwise ranking with sparse embedding bags: dense tower first, then joint training in fp16."""
import argparse
from dataclasses import dataclass

import torch
from torch import nn
import torch.nn.functional as F

from _catalog import Catalog


@dataclass
class Phase:
    name: str
    steps: int
    joint: bool
    lr: float


class Tower(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.net(self.norm(x))


class Ranker(nn.Module):
    def __init__(self, vocab, dim=24, width=48):
        super().__init__()
        self.tokens = nn.EmbeddingBag(vocab, dim, mode="mean", sparse=True)
        self.query, self.doc = Tower(dim, width), Tower(dim, width)
        self.gain = nn.Parameter(torch.tensor(0.3))

    def forward(self, q, d, docs):
        zq = self.query(self.tokens(*q))
        zd = self.doc(self.tokens(*d)).unflatten(0, (-1, docs))
        return torch.einsum("qc,qdc->qd", zq, zd) * self.gain


def listwise(scores, rel):
    return F.kl_div(F.log_softmax(scores.float(), -1), F.softmax(2 * rel, -1), reduction="batchmean")


def pairwise(scores, rel):
    s = scores.float()
    ds, dr = s[:, :, None] - s[:, None, :], rel[:, :, None] - rel[:, None, :]
    return F.softplus(-ds)[dr > 0.3].mean()


class Optimizers:
    """Sparse and dense parameters go to different optimizers."""

    def __init__(self, model, lr, token_lr):
        self.sparse = torch.optim.SGD(model.tokens.parameters(), lr=token_lr)
        self.dense = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("tokens")],
                                       lr=lr, weight_decay=0.01)
        self.scaler = torch.amp.GradScaler("cpu")

    def zero(self):
        self.sparse.zero_grad(set_to_none=True)
        self.dense.zero_grad(set_to_none=True)

    def plain(self, loss):
        loss.backward()
        self.dense.step()

    def mixed(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.dense)
        self.sparse.step()
        self.scaler.update()


def ndcg(scores, rel):
    order = scores.float().argsort(-1, descending=True)
    gain = torch.softmax(2 * rel, -1)
    disc = 1 / torch.log2(torch.arange(rel.shape[1]) + 2.0)
    ideal = (gain.sort(-1, descending=True)[0] * disc).sum(-1)
    return ((gain.gather(1, order) * disc).sum(-1) / ideal).mean().item()


class Session:
    def __init__(self, args):
        self.args = args
        self.data = Catalog(seed=args.seed)
        self.model = Ranker(self.data.vocab)
        self.held = self.data.lists(64, args.docs)

    def losses(self, batch, half):
        q, d, rel = batch
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            scores = self.model(q, d, self.args.docs)
        return listwise(scores, rel) + self.args.pair_weight * pairwise(scores, rel), scores

    def run(self, phase):
        half = phase.joint and self.args.fp16
        opts = Optimizers(self.model, phase.lr, self.args.token_lr)
        total = 0.0
        for i in range(phase.steps):
            loss, _ = self.losses(self.data.lists(self.args.queries, self.args.docs), half)
            opts.zero()
            if half:
                opts.mixed(loss)
            else:
                opts.plain(loss)
                if phase.joint:
                    opts.sparse.step()
            total += loss.item()
            if (i + 1) % 20 == 0:
                with torch.no_grad():
                    _, s = self.losses(self.held, half)
                print(f"{phase.name:6s} {i + 1:4d}  loss {total / 20:.4f}  ndcg {ndcg(s, self.held[2]):.3f}",
                      flush=True)
                total = 0.0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dense-steps", type=int, default=60)
    p.add_argument("--joint-steps", type=int, default=160)
    p.add_argument("--queries", type=int, default=32)
    p.add_argument("--docs", type=int, default=10)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--token-lr", type=float, default=60.0)
    p.add_argument("--pair-weight", type=float, default=0.5)
    p.add_argument("--fp16", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--seed", type=int, default=21)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    session = Session(args)
    for phase in (Phase("dense", args.dense_steps, False, args.lr), Phase("joint", args.joint_steps, True, args.lr)):
        session.run(phase)


if __name__ == "__main__":
    main()
