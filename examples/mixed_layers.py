"""Heterogeneous layers: full attention, windows, and a recurrent state per sequence."""

import kvcupy as kv

device = kv.default_device()
shape = dict(num_kv_heads=2, head_dim=64)
cache = kv.PagedKVCache(
    num_q_heads=8, device=device, num_tokens=4096, max_seq_len=1024, max_batch_tokens=64,
    groups=[
        kv.SlidingWindow(layers=[0, 2], window=128, **shape),
        kv.FullAttention(layers=[3], **shape),
        kv.Recurrent(layers=[1], state={"ssm": ((64, 16), "fp32")}, checkpoint_tokens=64),
    ],
)  # fmt: skip
print(cache.plan())

cache.add_sequence("a")
for _ in range(10):
    rows = [device.zeros((64, heads, 64), "bf16") for heads in (8, 2, 2)]
    with cache.forward(["a"], [64]):
        for layer in range(4):
            if layer == 1:
                slots = cache.state_slots()
                cache.state(layer, "ssm")[slots] += 64  # the model's own scan, in place
            else:
                cache.attention(layer, *rows)

missing = cache.fork_sequence("a", "b", at=640)
print("b has", cache.sequence_length("b"), "tokens, to be computed again:", missing)
missing = cache.fork_sequence("a", "c", at=300)  # the windows have moved on
print("c has", cache.sequence_length("c"), "tokens, to be computed again:", missing)
