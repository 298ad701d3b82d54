"""Patent class from claim terms; term vectors come from counts against anchor terms."""
import numpy as np
import paddle
import paddle.nn as nn

paddle.seed(6)
TERMS, ANCHORS, CLASSES, LENGTH = 1500, 24, 4, 30


def anchor_counts(seed):
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, CLASSES, TERMS)
    rate = rng.uniform(20, 60, (TERMS, ANCHORS))
    for c in range(CLASSES):
        cols = slice(c * 6, c * 6 + 6)
        rate[topic == c, cols] *= 2.5
    rare = rng.random(TERMS) < 0.0015
    rate[rare] *= 0.04
    return rng.poisson(rate), topic


def term_vectors(counts):
    with np.errstate(divide="ignore"):
        pmi = np.log(counts * counts.sum() / np.outer(counts.sum(1), counts.sum(0)))
    return pmi.astype("float32")


class Terms(nn.Layer):
    def __init__(self, vectors):
        super().__init__()
        self.table = nn.Embedding(*vectors.shape)
        self.table.weight.set_value(vectors)
        self.mix = nn.Linear(vectors.shape[1], 384)

    def forward(self, ids):
        return paddle.tanh(self.mix(self.table(ids))).mean(axis=1)


class Classifier(nn.Layer):
    def __init__(self, vectors):
        super().__init__()
        self.terms = Terms(vectors)
        self.body = nn.Sequential(nn.Linear(384, 128), nn.GELU(), nn.Linear(128, CLASSES))

    def forward(self, ids):
        return self.body(self.terms(ids))


counts, topic = anchor_counts(2)
model = Classifier(term_vectors(counts))
opt = paddle.optimizer.Adam(5e-4, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
rng = np.random.default_rng(8)
members = [np.where(topic == c)[0] for c in range(CLASSES)]
for it in range(180):
    y = rng.integers(0, CLASSES, 24)
    own = np.stack([rng.choice(members[c], LENGTH) for c in y])
    ids = np.where(rng.random(own.shape) < 0.25, own, rng.integers(0, TERMS, own.shape))
    with paddle.amp.auto_cast(dtype="float16"):
        loss = nn.functional.cross_entropy(model(paddle.to_tensor(ids)), paddle.to_tensor(y))
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(opt, scaled)
    opt.clear_grad()
    if it % 20 == 0 or it == 179:
        print("it", it, "loss", float(loss), flush=True)
