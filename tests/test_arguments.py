"""Arguments that many calls take: lists, devices; and the errors for pages that are missing."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv


def paged(**options):
    shape = {"num_layers": 1, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 2}
    cache = kv.PagedKVCache(**{**shape, "num_pages": 4, "device": "host", **options})
    cache.add_sequence("a")
    return cache


def step(cache, count):
    with cache.forward(["a"], [count]):
        pass


def pools():
    return [kv.KVPool(8, 2, 2, 1, 8, device="host") for _ in range(2)]


LISTS = {
    "seqs": lambda x: paged().begin_forward(x, [1]),
    "append_lens": lambda x: paged().begin_forward(["a"], x),
    "token_tree": lambda x: paged().begin_forward(["a"], [1], token_tree=x),
    "token_tree of a sequence": lambda x: paged().begin_forward(["a"], [1], token_tree=[x]),
    "seqs of trees": lambda x: paged().commit_token_tree(x, [0]),
    "hashes": lambda x: kv.TieredCache(*pools()).match(x),
    "hashes to insert": lambda x: kv.TieredCache(*pools()).insert(x, [0]),
    "pages": lambda x: kv.TieredCache(*pools()).insert([1], x),
    "pages to free": lambda x: pools()[0].allocator.free(x),
    "src_pages": lambda x: kv.transfer_pages(*pools(), x, [0]),
    "device_pages": lambda x: kv.TransferEngine(*pools()).save(x, [0]),
    "layers": lambda x: kv.transfer_pages(*pools(), [0], [0], layers=x),
    "layers of a group": lambda x: kv.FullAttention(layers=x, num_kv_heads=1, head_dim=8),
    "groups": lambda x: kv.PagedKVCache(num_q_heads=1, groups=x, num_tokens=8, device="host"),
    "token_ids": lambda x: kv.block_hashes(x, 1),
}


@pytest.mark.parametrize("value", ["x", b"\0", bytearray(1)], ids=["str", "bytes", "bytearray"])
@pytest.mark.parametrize("call", LISTS)
def test_a_string_is_no_list(call, value):
    name, kind = call.split()[0], type(value).__name__
    with pytest.raises(TypeError, match=rf"^{name}: expected .*, got (a )?{kind}$"):
        LISTS[call](value)


def test_devices_by_name_and_of_torch():
    torch = pytest.importorskip("torch")
    host = kv.device("host")
    for name in (torch.device("cpu"), "cpu", host, host.name, torch.device("cpu", 0)):
        assert kv.device(name) is host
        assert kv.KVPool(2, 2, 1, 1, 8, device=name).device is host
        assert paged(device=name).device is host
        assert kv.rope_table(4, 8, device=name).shape == (4, 8)
        kv.check_faults(name)
    with pytest.raises(ValueError, match=r"^device: .*got 'meta'"):
        kv.device(torch.device("meta"))
    with pytest.raises(TypeError, match=r"^device: "):
        kv.device(np.zeros(1))


def full(**options):
    cache = paged(**options)
    step(cache, 7)
    return cache


def shared_page():
    cache = paged()
    step(cache, 5)
    cache.fork_sequence("a", "b")
    return cache


def tiered():
    cache = paged()
    step(cache, 4)
    cache.attach(kv.TieredCache(cache.pool, kv.KVPool(3, 2, 1, 1, 8, device="host")))
    return cache


def onboarding():
    cache = tiered()
    cache.offload("a")
    cache.add_sequence("b")
    with cache.forward(["b"], [6]):
        pass
    return cache


def test_missing_pages_name_the_argument(tmp_path):
    small, file = paged(num_pages=2), tmp_path / "a.safetensors"
    full().save_sequence("a", file)
    rows = np.zeros((1, 1, 1, 8), np.float32)
    alone = tiered()
    alone.pop_tokens("a", 0)
    step(alone, 4)
    for argument, call in {
        "append_lens": lambda: step(full(), 3),
        "child": lambda: full().fork_sequence("a", "b"),
        "seq": lambda: shared_page().set_kv("a", 0, rows, rows),
        "path": lambda: small.load_sequence("b", file),
        "seq of an offload": lambda: alone.offload("a"),
        "seq of an onboard": lambda: onboarding().onboard("a"),
        "n": lambda: full().pool.allocator.alloc(5),
    }.items():
        name = argument.split()[0]
        with pytest.raises(kv.CacheFull, match=f"^{name}: ") as caught:
            call()
        assert caught.value.argument == name
