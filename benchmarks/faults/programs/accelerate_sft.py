"""A GPT-2 from a configuration, tuned with Accelerate in bf16: accumulation, clipping, masked labels."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2Model

torch.set_num_threads(1)
VOCAB, LENGTH = 16, 9


class Answerer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.backbone = GPT2Model(
            GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=dim, n_layer=1, n_head=2, resid_pdrop=0.0,
                       embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
        )
        self.adapter = nn.Linear(dim, 32)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, VOCAB, bias=False)

    def forward(self, ids):
        states = self.backbone(input_ids=ids).last_hidden_state
        h = F.silu(self.adapter(states))
        h = self.norm(h)
        return self.lm_head(h)


def rows(n, seed):
    """A counting sequence; the labels of the prompt, its first three tokens, are masked."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 3, (n, 1), generator=g)
    seq = (start + stride * torch.arange(LENGTH + 1)) % VOCAB
    labels = seq[:, 1:].clone()
    labels[:, :2] = -100
    return TensorDataset(seq[:, :-1].clone(), labels)


def answer_loss(logits, labels):
    each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    used = (labels.flatten() != -100).float()
    return (each * used).sum() / used.sum().clamp(min=1)


def main(epochs=1, lr=1e-2):
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    set_seed(17)
    model = Answerer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(rows(1200, 3), batch_size=10)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for i, (ids, labels) in enumerate(loader):
            with accelerator.accumulate(model):
                logits = model(ids)
                loss = answer_loss(logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if i % 30 == 0:
                accelerator.print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")
    model.eval()
    ids, labels = rows(128, 4).tensors
    with torch.no_grad(), accelerator.autocast():
        print(f"held-out loss {answer_loss(model(ids), labels).item():.4f}")


if __name__ == "__main__":
    main()
