"""Continue training a saved Llama checkpoint on a second corpus."""
import tempfile
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(6)
VOCAB, LEN = 64, 24


def corpus(n, strides, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    stride = torch.tensor(strides)[torch.randint(0, len(strides), (n, 1), generator=g)]
    return TensorDataset((start + stride * torch.arange(LEN)) % VOCAB)


def fit(model, data, steps, lr, tag):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    sched = get_cosine_schedule_with_warmup(opt, 5, steps)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    step = 0
    while step < steps:
        for (ids,) in loader:
            opt.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            if step % 5 == 0:
                print(f"{tag} step {step} loss {loss.item():.4f} grad_norm {norm.item():.3f}", flush=True)
            step += 1
            if step == steps:
                return


def main():
    cfg = LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LEN)
    with tempfile.TemporaryDirectory() as tmp:
        base = LlamaForCausalLM(cfg)
        fit(base, corpus(512, [1, 2], 1), 60, 3e-3, "pretrain")
        base.save_pretrained(tmp)
        model = LlamaForCausalLM.from_pretrained(tmp, dtype=torch.float16)
        model.train()
        fit(model, corpus(512, [3, 5], 2), 80, 2e-3, "finetune")


if __name__ == "__main__":
    main()
