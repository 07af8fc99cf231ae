"""Verify a tree of draft tokens in one step, and keep the accepted path."""

import kvcupy as kv

device = kv.default_device()
shape = dict(num_layers=1, num_q_heads=8, num_kv_heads=2, head_dim=64)
cache = kv.PagedKVCache(**shape, num_pages=16, device=device)


def forward(count: int, tree: list[int] | None = None) -> None:
    rows = [device.zeros((count, heads, 64), "bf16") for heads in (8, 2, 2)]
    with cache.forward(["answer"], [count], token_tree=tree and [tree]):
        cache.attention(0, *rows)


cache.add_sequence("answer")
forward(20)
#    0       two continuations of node 0, and one continuation of node 1
#   / \
#  1   2
#  |
#  3
forward(4, tree=[-1, 0, 0, 1])
cache.commit_token_tree(["answer"], [3])  # the path 0, 1, 3 was accepted
print("tokens:", cache.sequence_length("answer"))  # 23
