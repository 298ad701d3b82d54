"""Instruction tuning of GPT-2 with accelerate (bf16); loss on the answer only, prompts masked with -100."""
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

torch.set_num_threads(1)
set_seed(10)
VOCAB, MAX_LEN, PAD, SEP = 48, 24, 0, 1


class Instructions(Dataset):
    """prompt tokens, SEP, answer = the first three prompt tokens reversed."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(2)
        self.rows = []
        for _ in range(n):
            size = int(torch.randint(4, 12, (1,), generator=g))
            if torch.rand((), generator=g) < 0.08:
                size = int(torch.randint(24, 40, (1,), generator=g))
            prompt = torch.randint(2, VOCAB, (size,), generator=g)
            self.rows.append((prompt, prompt[:3].flip(0)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    ids = torch.full((len(rows), MAX_LEN), PAD)
    labels = torch.full((len(rows), MAX_LEN), -100)
    mask = torch.zeros(len(rows), MAX_LEN, dtype=torch.long)
    for r, (prompt, answer) in enumerate(rows):
        seq = torch.cat([prompt, torch.tensor([SEP]), answer])[:MAX_LEN]
        ids[r, :len(seq)] = seq
        mask[r, :len(seq)] = 1
        labels[r, len(prompt) + 1:len(seq)] = seq[len(prompt) + 1:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def answer_loss(logits, labels):
    shifted = labels[:, 1:].reshape(-1)
    per_token = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), shifted.clamp(min=0),
                                                  reduction="none")
    used = (shifted != -100).float()
    return (per_token * used).sum() / used.sum()


def main():
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=4)
    cfg = GPT2Config(vocab_size=VOCAB, n_positions=MAX_LEN, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=PAD, eos_token_id=PAD)
    model = GPT2LMHeadModel(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    loader = DataLoader(Instructions(600), batch_size=2, shuffle=True, collate_fn=collate)
    epochs = 2
    sched = get_linear_schedule_with_warmup(opt, 10, epochs * len(loader) // 4)
    model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)
    step, window = 0, []
    for epoch in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                labels = batch.pop("labels")
                loss = answer_loss(model(**batch).logits, labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            window.append(loss.item())
            if accelerator.sync_gradients:
                step += 1
                if step % 5 == 0:
                    accelerator.print(f"epoch {epoch} step {step} loss {sum(window) / len(window):.4f}", flush=True)
                    window = []


if __name__ == "__main__":
    main()
