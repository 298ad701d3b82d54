import torch


class Catalog:
    """Queries and documents as bags of token ids; relevance comes from hidden token topics."""

    def __init__(self, vocab=120, topics=8, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.topic = torch.randn(vocab, topics, generator=self.g)
        self.vocab = vocab

    def bags(self, n, low, high):
        size = torch.randint(low, high, (n,), generator=self.g)
        ids = torch.randint(self.vocab, (int(size.sum()),), generator=self.g)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), size.cumsum(0)[:-1]])
        owner = torch.repeat_interleave(torch.arange(n), size)
        mean = torch.zeros(n, self.topic.shape[1]).index_add_(0, owner, self.topic[ids])
        return ids, offsets, mean / size.unsqueeze(1).sqrt()

    def lists(self, queries, docs):
        q_ids, q_off, q = self.bags(queries, 2, 6)
        d_ids, d_off, d = self.bags(queries * docs, 4, 12)
        rel = torch.einsum("qt,qdt->qd", q, d.view(queries, docs, -1)) / 3
        return (q_ids, q_off), (d_ids, d_off), rel
