"""Intent classification: BERT with a large vocabulary, lower layers frozen; logs gradient sparsity."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

torch.set_num_threads(1)
torch.manual_seed(2)
VOCAB, LEN, INTENTS = 6000, 12, 6


def utterances(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, INTENTS, (n,), generator=g)
    ids = torch.randint(100, 400, (n, LEN), generator=g)
    length = torch.randint(5, LEN + 1, (n, 1), generator=g)
    mask = (torch.arange(LEN)[None] < length).long()
    ids[:, 0] = 1
    for col in (1, 3):
        ids[:, col] = 10 + 5 * y + torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(ids * mask, mask, y)


def zero_fraction(model):
    zeros = total = 0
    for p in model.parameters():
        if p.grad is not None:
            zeros += (p.grad == 0).sum().item()
            total += p.grad.numel()
    return zeros / total


def main():
    cfg = BertConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
                     intermediate_size=96, max_position_embeddings=64, num_labels=INTENTS,
                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(cfg)
    for p in model.bert.encoder.layer[0].parameters():
        p.requires_grad_(False)
    loader = DataLoader(utterances(512, 1), batch_size=16, shuffle=True)
    val = DataLoader(utterances(96, 2), batch_size=48)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
    step = 0
    for epoch in range(6):
        model.train()
        for ids, mask, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(input_ids=ids, attention_mask=mask, labels=y).loss
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step % 16 == 0:
                print(f"step {step} loss {loss.item():.4f} zero gradients {zero_fraction(model):.1%}", flush=True)
            scaler.step(opt)
            scaler.update()
            step += 1
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            hits = sum((model(input_ids=i, attention_mask=m).logits.argmax(-1) == y).sum().item() for i, m, y in val)
        print(f"epoch {epoch} val acc {hits / 96:.3f}", flush=True)


if __name__ == "__main__":
    main()
