"""Options that the adapters of engines share."""

from __future__ import annotations

import pytest

from kvcupy.interop.engine_options import StoreOptions, as_key, open_file, store_options

DIGITS = "ab" * 32


@pytest.mark.parametrize("content", [bytes.fromhex(DIGITS), f"{DIGITS}\n".encode()])
def test_a_key_may_be_in_a_file(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    assert as_key(f"file:{tmp_path}/key") == as_key(DIGITS) == bytes.fromhex(DIGITS)


def test_other_keys_are_left_to_the_store():
    assert [as_key(key) for key in (None, b"short", 7)] == [None, b"short", 7]


@pytest.mark.parametrize("where", ["text", "file"])
def test_an_error_does_not_contain_the_key(tmp_path, where):
    (tmp_path / "key").write_text("a secret")
    with pytest.raises(ValueError, match="expected 64 hexadecimal digits") as caught:
        as_key("a secret" if where == "text" else f"file:{tmp_path}/key")
    assert "a secret" not in str(caught.value)


def busy(*names):
    """Return a function that opens files, except those that other engines have open."""

    def opened(path):
        if path.name in names:
            raise BlockingIOError
        return path

    return opened


def test_a_path_is_one_file_for_each_worker(tmp_path):
    file = tmp_path / "file"
    assert open_file(str(file), "model", busy()) == file
    assert open_file(str(file), "model", busy(), rank=2) == tmp_path / "file.rank2"
    with pytest.raises(BlockingIOError):
        open_file(str(file), "model", busy("file"))


def test_a_folder_has_a_file_for_each_engine(tmp_path):
    assert open_file(tmp_path, "model", busy()) == tmp_path / "model-0.kv"
    assert open_file(f"{tmp_path}/new/", "model", busy()) == tmp_path / "new/model-0.kv"
    taken = busy("model-0.kv", "model-1.kv")
    assert open_file(str(tmp_path), "model", taken, rank=1) == tmp_path / "model-2.kv"
    with pytest.raises(BlockingIOError):
        open_file(tmp_path, "model", busy(*(f"model-{number}.kv" for number in range(16))))


def test_stores_are_urls_with_or_without_a_capacity():
    url = "file:/mnt/kv"
    expected = [StoreOptions(url), StoreOptions(url), StoreOptions(url, 5)]
    assert store_options([url, {"url": url}, {"url": url, "capacity_bytes": 5}]) == expected
    assert store_options(expected) == expected


@pytest.mark.parametrize("stores", [
    None, url := "file:/mnt/kv", [], [7], [{}], [{"url": 7}], [{"url": url, "ttl_s": 1}],
    [{"url": url, "capacity_bytes": 1.5}], [{"url": url, "capacity_bytes": True}],
], ids=repr)  # fmt: skip
def test_other_stores_are_refused(stores):
    with pytest.raises(TypeError, match=r"^(stores|capacity_bytes): expected"):
        store_options(stores)
