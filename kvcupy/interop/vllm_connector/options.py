"""Options of the connector, from `kv_connector_extra_config`, and what its blocks are."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...formats import Encoding
from ..engine_options import StoreOptions, as_key, store_options

_SAMPLE_BYTES, _SAMPLE_STEP = 4096, 2**20  # of files of weights


@dataclass(frozen=True)
class Options:
    """Options of `KvcupyConnector`."""

    host_bytes: int = 2**30  # host memory for blocks
    # below host memory, the nearest first; each a URL of `BlockStore.open`, or a dict with "url"
    # and "capacity_bytes"
    stores: tuple[StoreOptions, ...] = ()
    # format of blocks below the device, such as "nvfp4"; None: the engine's
    encoding: str | None = None
    encryption_key: bytes | None = None  # 32 bytes, 64 hexadecimal digits, or "file:PATH" of either
    layerwise: bool = True  # load layer by layer while the model computes, if no other request runs

    @classmethod
    def of(cls, extra_config: Mapping[str, Any] | None) -> Options:
        """Check options; TypeError or ValueError names the option.

        >>> Options.of({"host_bytes": 2**20}).layerwise
        True
        """
        values = dict(extra_config or {})
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(
                f"kv_connector_extra_config: expected options of {', '.join(known)}, got "
                f"{', '.join(map(str, unknown))}"
            )
        values = {name: value for name, value in values.items() if value is not None}
        _require("host_bytes", values, int)
        if values.get("host_bytes", 1) < 1:
            raise ValueError(f"host_bytes: expected at least 1, got {values['host_bytes']}")
        _require("encoding", values, str)
        _require("layerwise", values, bool)
        if "stores" in values:
            values["stores"] = tuple(store_options(values["stores"]))
        if "encoding" in values:
            values["encoding"] = str(Encoding.of(values["encoding"]))
        values["encryption_key"] = key = as_key(values.get("encryption_key"))
        _require("encryption_key", values, bytes)
        if key is not None and len(key) != 32:
            raise ValueError(f"encryption_key: expected 32 bytes, got {len(key)}")
        if key is not None and not values.get("stores"):
            raise ValueError("encryption_key: expected None without stores, got a key")
        return cls(**values)


def _require(name: str, values: Mapping[str, Any], kind: type) -> None:
    value = values.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and value is True)):
        got = type(value).__name__ if kind is bytes else repr(value)  # which may be a secret
        raise TypeError(f"{name}: expected {kind.__name__}, got {got}")


# --- What blocks are ---


def setting(config: Any, path: str, default: Any = None) -> Any:
    """Return an attribute of vLLM's configuration, such as "model_config.model"."""
    for name in path.split("."):
        config = getattr(config, name, None)
        if config is None:
            return default
    return config


def describe_blocks(config: Any, layout: str) -> str:
    """Return a string that distinguishes blocks of other weights, settings, layouts and workers."""
    model = str(setting(config, "model_config.model", ""))
    rank, size = (
        setting(config, f"parallel_config.{name}", default)
        for name, default in (("rank", 0), ("world_size", 1))
    )
    described = {
        "model": _weights_of(model) or model,
        "layout": layout,
        "rank": f"{rank} of {size}",
        "tensor_parallel": setting(config, "parallel_config.tensor_parallel_size", 1),
    }
    names = (
        "model_config.revision", "model_config.dtype", "model_config.quantization",
        "model_config.seed", "load_config.load_format", "cache_config.cache_dtype",
        "cache_config.block_size", "cache_config.kv_cache_layout", "attention_config.backend",
    )  # fmt: skip
    described.update((name.partition(".")[2], str(setting(config, name))) for name in names)
    if described["load_format"].rpartition(".")[2].lower() != "dummy":
        del described["seed"]  # which then only makes samples
    to_json = getattr(setting(config, "model_config.hf_config"), "to_json_string", None)
    if callable(to_json):
        described["hf_config"] = _digest(_without_paths(to_json()))
    if setting(config, "device_config.device_type") == "cpu":
        described["processor"] = _instruction_set()
    return json.dumps(described, sort_keys=True, separators=(",", ":"))


def _without_paths(hf_config: str) -> bytes:
    values = json.loads(hf_config)
    values.pop("_name_or_path", None)
    return json.dumps(values, sort_keys=True).encode()


def _digest(*parts: bytes) -> str:
    hasher = blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def _weights_of(model: str) -> str | None:
    """Digest the weights in a folder, from a part of each MiB; None for a name or an empty folder.

    Copies of the weights have one digest on every machine, and weights that replace others at the
    same path have another.
    """
    folder = Path(model)
    if not folder.is_dir():
        return None
    suffixes = {".safetensors", ".bin", ".pt", ".gguf"}
    files = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
    parts: list[bytes] = []
    for path in files:
        parts.append(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            for start in range(0, path.stat().st_size, _SAMPLE_STEP):
                file.seek(start)
                parts.append(file.read(_SAMPLE_BYTES))
    return _digest(*parts) if parts else None


def _instruction_set() -> str:
    """Name the processor's vector instructions: vLLM's layout of K depends on them."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split())
                break
    except OSError:
        pass  # not Linux: the machine alone tells them apart
    vectors = ("amx_tile", "avx512f", "avx2", "asimd", "sve", "bf16")
    return " ".join([platform.machine(), *(flag for flag in vectors if flag in flags)])
