"""Capture a decode step once, and replay it with other tokens and lengths."""

import kvcupy as kv

device = kv.default_device()
shape = dict(num_layers=2, num_q_heads=8, num_kv_heads=2, head_dim=64)
cache = kv.PagedKVCache(**shape, num_pages=32, max_seq_len=128, device=device)
stream = device.stream()
rows = [device.zeros((2, heads, 64), "bf16") for heads in (8, 2, 2)]
outs = [device.zeros((2, 8, 64), "bf16") for _ in range(2)]


def step() -> None:
    for layer in range(2):
        cache.attention(layer, *rows, out=outs[layer], stream=stream)


for name in "ab":
    cache.add_sequence(name)
with cache.forward(["a", "b"], [1, 1]), stream.capture() as graph:
    step()
with cache.forward(["a", "b"], [1, 1]):
    graph.launch(stream)
with cache.forward(["b"], [1]):  # fewer sequences than captured
    graph.launch(stream)
stream.synchronize()
print({name: cache.sequence_length(name) for name in "ab"})  # {'a': 2, 'b': 3}
