"""GPT-2 pre-training in short slots on a pre-emptible machine: each slot resumes from the last checkpoint."""
import os
import tempfile
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_constant_schedule_with_warmup

torch.set_num_threads(1)
VOCAB, LEN, BATCH = 64, 32, 16
STEPS_PER_SLOT, SLOTS = 12, 10


def corpus(n):
    g = torch.Generator().manual_seed(1)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(LEN)) % VOCAB)


def build():
    cfg = GPT2Config(vocab_size=VOCAB, n_positions=LEN, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0,
                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    return model, opt, get_constant_schedule_with_warmup(opt, 10)


def token_loss(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].float()
    # per-token losses are added up; the learning rate is tuned for this convention
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="sum")


def run_slot(path, data, slot):
    torch.manual_seed(100 + slot)
    model, opt, sched = build()
    scaler = torch.amp.GradScaler("cpu", growth_interval=2000)
    step = 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        sched.load_state_dict(state["scheduler"])
        step = state["step"]
        print(f"resumed at step {step}", flush=True)
    loader = iter(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True))
    for _ in range(STEPS_PER_SLOT):
        (ids,) = next(loader)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = token_loss(model, ids)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 4 == 0:
            print(f"step {step} loss/token {loss.item() / (BATCH * (LEN - 1)):.4f}", flush=True)
        step += 1
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(),
                "scheduler": sched.state_dict(), "step": step}, path)


def main():
    data = corpus(512)
    with tempfile.TemporaryDirectory() as tmp:
        for slot in range(SLOTS):
            run_slot(os.path.join(tmp, "last.pt"), data, slot)


if __name__ == "__main__":
    main()
