"""Measure rotations followed by the store, by kvcupy and torch.

Every case holds several sets of arguments, which calls rotate over. A candidate makes one call per
set, and returns the rotated query and key, or None if they are where query and key were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from common.checks import BF16, MAX_POSITIONS, ROPE_BASE, Rotation, normal_bits, sample

import kvcupy as kv

from . import store
from .baselines import Builder, Wrap

TORCH_ROUNDINGS = 3  # of cos, of a product, of the sum
NORM_ROUNDINGS = 2  # of the normalised value, and of its product with the weight

Rotate = Callable[[Any, str], Any]  # rows, and "query" or "key"
Write = Callable[[list[Any], Any, list[Any]], None]  # targets, slots, parts


@dataclass(frozen=True)
class Shape(store.Shape):
    """One case: what is rotated, how many tokens, and the format of the cache."""

    @property
    def norm(self) -> bool:
        return self.format.endswith("norm")

    @property
    def stored(self) -> str:
        """The format of the cache, as stores are named."""
        return self.format.removesuffix(" norm")

    @property
    def rotary(self) -> int:
        return self.model.rope or self.model.head_dim

    @property
    def bytes_moved(self) -> int:
        """Bytes of one call: query and key read and written, value, cache, cos and sin, indices."""
        queries = self.model.q_heads * self.rotary
        keys = self.rotary if self.model.mla else self.model.row_widths[0]
        row = sum(self.model.row_widths)
        bytes_per_token = 4 * (queries + keys) + 4 * self.rotary + 8
        bytes_per_token += 2 * (row - keys) + row * (2 if self.stored == "bf16" else 1) + 8
        return self.tokens * bytes_per_token

    def build(self, device: Any, sets: int) -> RopeCase:
        return RopeCase(device, self, sets)


class RopeCase(store.StoreCase):
    """A query and the rows of a store. kvcupy rotates query and key in place."""

    def draw(self, rng: np.random.Generator) -> None:
        shape = self.shape
        rows = {"query": (shape.model.q_heads, shape.rotary)}
        rows |= dict(zip(self.rows, shape.parts, strict=True))
        for own in self.own:
            for name, part in rows.items():
                own[name] = self.bits(normal_bits(rng, (shape.tokens, *part)), "bf16")
        self.positions = (np.arange(shape.tokens) + 1000) % MAX_POSITIONS
        self.table = kv.rope_table(MAX_POSITIONS, shape.rotary, base=ROPE_BASE, device=self.device)
        self.shared["rope_table"] = self.bits(self.device.to_numpy(self.table), "fp32")
        self.shared["positions"] = self.bits(self.positions, "int64")
        weights = rng.uniform(0.5, 1.5, (2, shape.rotary)).astype(np.float32).astype(BF16)
        self.norms = dict(zip(("query", self.key), weights, strict=True)) if shape.norm else {}
        self.shared |= {f"{name}_norm": self.bits(w, "bf16") for name, w in self.norms.items()}
        if shape.model.mla:
            self.options["interleaved"] = True
        self.draw_caches(rng)

    @property
    def key(self) -> str:
        """The argument that is rotated with the query."""
        return "rope_key" if self.shape.model.mla else "key"

    def rotate_and_write(
        self, rotate: Rotate, targets: list[Any], write: Write
    ) -> Callable[..., Any]:
        """Return what rotates the query and key of a set, writes the rows, and returns both."""
        names = list(self.own[0])

        def work(*arrays: Any) -> tuple[Any, Any]:
            parts = dict(zip(names, arrays, strict=True))
            for name in ("query", self.key):
                parts[name] = rotate(parts[name], name)
            write(targets, parts["slot_mapping"], [parts[name] for name in self.rows])
            return parts["query"], parts[self.key]

        return work

    def torch_work(self, torch: Any, wrap: Wrap) -> Callable[..., Any]:
        """Return a rotation and store as models are written."""
        table, positions = (
            wrap(self.shared[n].array, self.shared[n].format) for n in ("rope_table", "positions")
        )
        norms = {n: wrap(self.shared[f"{n}_norm"].array, "bf16") for n in self.norms}
        rotate = rotation_by_torch(torch, table[positions], self.shape.model.mla, norms)
        return self.rotate_and_write(rotate, *self.torch_targets(torch, wrap))

    def others(self, torch: Any, wrap: Wrap) -> dict[str, Builder]:
        return {}

    @cached_property
    def exact(self) -> list[dict[str, Rotation]]:
        """What query and key of some tokens become, in float64."""
        table, tokens = self.device.to_numpy(self.table), sample(self.shape.tokens)
        shape = (len(tokens), -1, self.shape.rotary)
        return [
            {
                name: Rotation.of(
                    own[name].host[tokens].reshape(shape), table, self.positions[tokens],
                    interleaved=self.shape.model.mla, norm=self.norms.get(name),
                )
                for name in ("query", self.key)
            }
            for own in self.own
        ]  # fmt: skip

    def check(self, candidate: str, results: Sequence[Any]) -> None:
        """Compare rotated rows with float64, and the caches with the rotated rows, byte by byte.

        `results` are the rotated query and key of each call; None: they are where they were.
        """
        roundings = None
        if not candidate.startswith("kvcupy"):
            roundings = TORCH_ROUNDINGS + NORM_ROUNDINGS * self.shape.norm
        tokens, sets = sample(self.shape.tokens), []
        for i, (own, result) in enumerate(zip(self.own, results, strict=True)):
            rotated = result if result is not None else (own["query"].array, own[self.key].array)
            got = dict(zip(("query", self.key), map(self._bits, rotated), strict=True))
            for name, exact in self.exact[i].items():
                case = f"{self.shape.name}, {candidate}, {name} of set {i}"
                exact.require(case, got[name][tokens].reshape(exact.exact.shape), roundings)
            sets.append([got[n] if n == self.key else own[n].host for n in self.rows])
        self.check_caches(candidate, sets)

    def _bits(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.device.to_numpy(array)).view(np.uint16)


# --- Baselines ------------------------------------------------------------------------------------
#
# torch rotates as transformers does, in the model's dtype with one rounding per operation. The cos
# and sin of the tokens were looked up beforehand, as a model does once for all of its layers.


def rotation_by_torch(torch: Any, table: Any, interleaved: bool, norms: dict[str, Any]) -> Rotate:
    """Return the rotation of bf16 tensors by rows `[cos | sin]` (T, D), in bf16."""
    half = table.shape[1] // 2
    cosine, sine = table[:, :half].bfloat16(), table[:, half:].bfloat16()
    if not interleaved:
        cosine, sine = torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)
    rotate_pairs = partial(_torch_pairs if interleaved else _torch_halves, torch)

    def rotate(x: Any, name: str) -> Any:
        if name in norms:
            x = _torch_norm(torch, x, norms[name])
        if x.ndim == 2:
            return rotate_pairs(x, cosine, sine)
        return rotate_pairs(x, cosine[:, None], sine[:, None])

    return rotate


def _pairs_of(rows: Any, interleaved: bool) -> tuple[Any, Any]:
    half = rows.shape[-1] // 2
    if interleaved:
        return rows[..., 0::2], rows[..., 1::2]
    return rows[..., :half], rows[..., half:]


def _torch_halves(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, False)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _torch_pairs(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, True)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.stack(rotated, dim=-1).flatten(-2)


def _torch_norm(torch: Any, x: Any, weight: Any) -> Any:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)
    return weight * values.to(x.dtype)
