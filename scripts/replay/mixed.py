"""Two services of a trace over one model of mixed layers: one has tiers, the other computes all.

    tiered   blocks from the tiers   | steps for the rest of the prompt, and for the output
    whole    steps for the prompt, whose blocks and states are the oracle | for the output

Equal tokens have equal bits in both, however they are cut into steps, so what the tiers return is
compared byte by byte with what the other service has just computed for the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common.report import format_table
from serving.engine import Node
from serving.llama import FULL, STATE, WINDOW, Llama, LlamaConfig, random_weights
from serving.report import check_tokens
from serving.requests import Prompt
from serving.schedule import CacheSettings

import kvcupy as kv

from .content import mix
from .group_simulation import GroupShape, GroupSimulation
from .requests import BLOCK_TOKENS, Request
from .run import DISK_BLOCK, NAMED, RECORD
from .simulation import Sizes

WINDOW_TOKENS = 1024  # of Gemma 3, before they are scaled
CHECKPOINT_BLOCKS = 2  # between states that are kept
CHUNK_BLOCKS = 16  # of a step of the prefill
OUTPUT_TOKENS = 3  # at most
VOCAB, Q_HEADS, KV_HEADS, WIDTH = 256, 2, 1, 16
CHECK_EVERY = 20  # requests, of which one is compared with a pass without a cache
NAME = "request"


@dataclass(frozen=True)
class MixedSettings:
    """Settings of two services.

    Attributes
    ----------
    kinds : of the model's layers
    scale : divides the tokens of a block and of the window
    sizes : of the tiers of each group, in blocks; `sizes.device` are the most of a prompt, and the
        device has pages for one request
    disk : the path of the files of the disk tier; unused if `sizes` has no disk
    """

    kinds: tuple[str, ...]
    scale: int
    sizes: Sizes
    write: str = "back"
    disk: Path | None = None

    @property
    def page_tokens(self) -> int:
        return max(1, BLOCK_TOKENS // self.scale)

    @property
    def window(self) -> int:
        return max(1, WINDOW_TOKENS // self.scale)

    @property
    def interval(self) -> int:
        """Blocks between states that are kept."""
        return CHECKPOINT_BLOCKS if STATE in self.kinds else 1

    def shapes(self) -> list[GroupShape]:
        """Return what each group keeps, in the order of the cache's groups."""
        common = self.page_tokens, self.interval
        shapes = {
            FULL: GroupShape(*common),
            WINDOW: GroupShape(*common, window=self.window),
            STATE: GroupShape(*common, is_state=True),
        }
        return [shape for kind, shape in shapes.items() if kind in self.kinds]

    def steps(self, start: int, prompt: int, also: int = 0) -> Iterator[tuple[int, int]]:
        """Yield where the steps of a prefill begin and end, one of them at `also`.

        One ends at the last length whose state is kept.
        """
        kept = self.interval * self.page_tokens
        chunk = CHUNK_BLOCKS * self.page_tokens
        inner = {*range(start - start % chunk + chunk, prompt, chunk), prompt - prompt % kept, also}
        return pairwise([start, *sorted(cut for cut in inner if start < cut < prompt), prompt])


def prompt_of(number: int, request: Request, settings: MixedSettings) -> Prompt:
    """Return the tokens of a request: they follow from the blocks' hashes; one more ends them."""
    ids = np.array(request.hash_ids[: settings.sizes.device], np.uint64)
    offsets = np.arange(1, 1 + settings.page_tokens, dtype=np.uint64)
    tokens = mix(ids[:, None] * np.uint64(1 << 20) + offsets).reshape(-1) % np.uint64(VOCAB)
    tokens = np.append(tokens.astype(np.int64), number % VOCAB)
    return Prompt(
        number, request.timestamp, tokens, max(1, min(OUTPUT_TOKENS, request.output_length))
    )


@dataclass
class MixedOutcome:
    """The result of two services.

    Attributes
    ----------
    counts : requests; same_tokens (requests); checked_bytes and wrong_bytes, also by group;
        prompt_tokens, output_tokens, hit_tokens; plain_tokens (compared with a pass without a
        cache); cut (blocks beyond the longest prompt)
    hits, simulated : tokens that were not computed, or should not have been, by request
    wrong : the first requests with wrong bytes or tokens, described
    stats : `TieredCache.stats` at the end
    """

    counts: Counter[str] = field(default_factory=Counter)
    hits: list[int] = field(default_factory=list)
    simulated: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)


Blocks = list[Any]
"""Of each group of attention layers, an array (blocks, ...) of the bytes of a prompt's blocks."""


class Service:
    """A node that serves one request at a time; `tiers`: where it finds and leaves blocks."""

    def __init__(self, model: Llama, cache: CacheSettings, max_tokens: int) -> None:
        self.node = Node(model, cache, max_tokens)
        self.device, self.cache = model.device, self.node.cache
        self.page_tokens = cache.page_size
        kinds = [kind for kind in (FULL, WINDOW) if kind in model.config.kinds]
        self.layers = [model.config.layers_of(kind)[0] for kind in kinds]
        self.states = [
            self.cache.state(layer, name)
            for layer in model.config.layers_of(STATE)
            for name in model.config.state_shapes
        ]

    def step(self, tokens: Sequence[int], before_end: Callable[[], object] = lambda: None) -> int:
        """Append tokens; return the successor of the last.

        before_end : called once they are computed, while the tables of the step are valid
        """
        with self.cache.forward([NAME], [len(tokens)]):
            self.node.enqueue([tokens])
            self.node.compute.synchronize()
            before_end()
        return self.node.chosen(1)[0]

    def blocks(self, number: int, indices: Sequence[int]) -> Any:
        """Return the bytes of blocks of the running step, uint8 (blocks, parts, ...)."""
        table = self.cache.block_table(layer=self.layers[number], stream=self.node.compute)
        self.node.compute.synchronize()
        pages = self.device.to_numpy(table)[0, list(indices)]
        parts = [self.device.carrier(part)[pages] for part in self.cache.pools[number].parts]
        rows = np.stack([self.device.to_numpy(part) for part in parts], axis=1)
        return rows.view(np.uint8).reshape(len(pages), self.cache.pools[number].page_bytes)

    def state(self) -> Any:
        """Return the bytes of the live states, all layers; none where no layer has a state."""
        rows = [np.empty(0, np.float32)]
        if self.states:
            (slot,) = self.cache.state_slots_of([NAME])
            self.device.synchronize()
            rows += [self.device.to_numpy(state[slot]).reshape(-1) for state in self.states]
        return np.concatenate(rows).view(np.uint8)


class MixedReplay:
    """Two services of a model of mixed layers, and the simulation of one of them.

    Attributes
    ----------
    tiers : of the first service
    names : of the groups
    sizes : what each group has room for: pages on the device, blocks in host memory and on disk
    """

    def __init__(self, device: Any, settings: MixedSettings) -> None:
        self.settings, page = settings, settings.page_tokens
        most = settings.sizes.device * page + 1 + OUTPUT_TOKENS
        config = LlamaConfig(
            vocab=VOCAB, hidden=Q_HEADS * WIDTH, intermediate=2 * Q_HEADS * WIDTH,
            layers=len(settings.kinds), q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=WIDTH,
            kinds=settings.kinds, window=settings.window,
        )  # fmt: skip
        weights = random_weights(device, config)
        self.model = Llama(device, config, weights, context=most, invariant=True)
        cache = CacheSettings(
            -(-most // page), page, checkpoint_tokens=settings.interval * page,
            batch_invariant=True,
        )  # fmt: skip
        chunk = CHUNK_BLOCKS * page
        self.tiered, self.whole = (Service(self.model, cache, chunk) for _ in range(2))
        self.shapes = settings.shapes()
        self.tiers = kv.TieredCache(
            groups=self.tiered.cache, host_bytes=self._host_bytes(),
            write=settings.write, **self._disk(),
        )  # fmt: skip
        self.tiered.cache.attach(self.tiers)
        self.parts = [self.tiers.of_group(number) for number in range(len(self.shapes))]
        self.sizes = [self._sizes(part) for part in self.parts]
        self.simulation = GroupSimulation(self.shapes, self.sizes, settings.write)
        self.names = [kind for kind in (FULL, WINDOW, STATE) if kind in settings.kinds]
        self.outcome = MixedOutcome()

    def _page_bytes(self) -> list[int]:
        """Return the bytes of a block, by group."""
        cache = self.tiered.cache
        states = [part.group.state_bytes() for part in cache.plan().groups if part.num_slots]
        return [pool.page_bytes for pool in cache.pools] + [sum(states)] * bool(states)

    def _host_bytes(self) -> int:
        """Return the bytes of as many blocks as the host is to hold, with their states."""
        count = self.settings.sizes.host
        counts = [-(-count // s.interval) if s.is_state else count for s in self.shapes]
        return sum(n * b for n, b in zip(counts, self._page_bytes(), strict=True))

    def _disk(self) -> dict[str, Any]:
        count = self.settings.sizes.disk
        if not count:
            return {}
        slot = max(self._page_bytes()) + RECORD + DISK_BLOCK
        return {"disk": self.settings.disk, "disk_bytes": len(self.shapes) * count * slot}

    @staticmethod
    def _sizes(part: Any) -> Sizes:
        disk = part._shared.tiers.disk
        return Sizes(
            part.device_pool.num_pages, part.host_pool.num_pages,
            0 if disk is None else disk.num_slots,
        )  # fmt: skip

    def close(self) -> None:
        self.tiers.close()

    def run(
        self, requests: Sequence[Request], *, each: Callable[[int], None] = lambda done: None
    ) -> MixedOutcome:
        """Serve requests; `each` is called with the number of requests done, after each.

        Raises
        ------
        WrongTokens : the service without tiers differs from a pass without a cache
        """
        for number, request in enumerate(requests):
            prompt = prompt_of(number, request, self.settings)
            num_blocks = len(prompt.tokens) // self.settings.page_tokens
            self.outcome.counts["cut"] += len(request.hash_ids) - num_blocks
            self._request(prompt)
            each(number + 1)
        self.outcome.stats = self.tiers.stats()
        return self.outcome

    def _request(self, prompt: Prompt) -> None:
        outcome, counts, page = self.outcome, self.outcome.counts, self.settings.page_tokens
        hashes = kv.block_hashes(prompt.tokens, page)
        self.tiered.cache.add_sequence(NAME, hashes)
        length = self.tiered.cache.sequence_length(NAME)
        self._settle()
        want, blocks, state = self._whole(prompt, length)
        wrong: Counter[str] = Counter()
        expected = page * self.simulation.begin(hashes)
        got = self._tiered(prompt, length, blocks, state, wrong)

        outcome.hits.append(length)
        outcome.simulated.append(expected)
        counts["requests"] += 1
        counts["prompt_tokens"] += len(prompt.tokens)
        counts["output_tokens"] += len(want)
        counts["hit_tokens"] += length
        counts["same_tokens"] += got == want
        counts["wrong_bytes"] += sum(wrong.values())
        counts.update({f"wrong_bytes.{name}": count for name, count in wrong.items()})
        if (got != want or any(wrong.values())) and len(outcome.wrong) < NAMED:
            parts = [f"{count} bytes of {name}" for name, count in wrong.items() if count]
            outcome.wrong.append(
                f"request {prompt.number}: {', '.join(parts) or 'no byte'} of {length} tokens are "
                f"wrong; it got {got}, expected {want}"
            )
        if prompt.number % CHECK_EVERY == 0:
            counts["plain_tokens"] += check_tokens(self.model, [prompt], [want], "fp32").tokens

    def _whole(self, prompt: Prompt, length: int) -> tuple[list[int], list[Any], Any]:
        """Compute all of a request; return its tokens, its blocks, and the state at `length`."""
        service, page, tokens = self.whole, self.settings.page_tokens, prompt.tokens
        blocks: list[list[Any]] = [[] for _ in service.layers]
        service.cache.add_sequence(NAME)
        state = None
        for start, stop in self.settings.steps(0, len(tokens), length):
            indices = range(start // page, stop // page)

            def keep(indices: range = indices) -> None:
                for number, own in enumerate(blocks):
                    own.append(service.blocks(number, indices))

            output = [service.step(tokens[start:stop], keep)]
            if stop == length:
                state = service.state()
        while len(output) < prompt.output_length:
            output.append(service.step(output[-1:]))
        service.cache.remove_sequence(NAME)
        return output, [np.concatenate(own) for own in blocks], state

    def _tiered(
        self, prompt: Prompt, length: int, blocks: Sequence[Any], state: Any, wrong: Counter[str]
    ) -> list[int]:  # fmt: skip
        """Compute the rest of a request; count the wrong bytes of what was restored."""
        service, tokens = self.tiered, prompt.tokens
        if length:
            wrong[STATE] = self._compare(STATE, service.state(), state)

        def compare() -> None:
            names = (name for name in self.names if name != STATE)
            for number, (name, shape) in enumerate(zip(names, self.shapes, strict=False)):
                needed = shape.needed(length // self.settings.page_tokens)
                wrong[name] = self._compare(
                    name, service.blocks(number, needed), blocks[number][needed]
                )

        output: list[int] = []
        for start, stop in self.settings.steps(length, len(tokens)):
            self.simulation.step(start, stop)
            output = [service.step(tokens[start:stop], *[compare] * (start == length > 0))]
            self._settle()
        while len(output) < prompt.output_length:
            self.simulation.step(stop, stop := stop + 1)
            output.append(service.step(output[-1:]))
            self._settle()
        self.simulation.end(stop)
        service.cache.remove_sequence(NAME)
        self._settle()
        return output

    def _compare(self, name: str, got: Any, want: Any) -> int:
        self.outcome.counts.update({"checked_bytes": want.size, f"checked_bytes.{name}": want.size})
        return int(np.count_nonzero(got != want))

    def _settle(self) -> None:
        """Wait for all transfers, so that evictions do not depend on when they end.

        Statistics are asked for because this discards what is useless.
        """
        for part in self.parts:
            part.engine.save_stream.synchronize()
            part.engine.load_stream.synchronize()
        self.tiers.stats()


# The report --------------------------------------------------------------------------------------


def mixed_point(replay: MixedReplay) -> dict[str, Any]:
    """Return the report of two services."""
    outcome, settings, counts = replay.outcome, replay.settings, replay.outcome.counts
    groups = {
        name: {
            "device_pages": sizes.device, "host_blocks": sizes.host, "disk_blocks": sizes.disk,
            "page_bytes": part.host_pool.page_bytes,
            "checked_bytes": counts[f"checked_bytes.{name}"],
            "wrong_bytes": counts[f"wrong_bytes.{name}"],
        }
        for name, sizes, part in zip(replay.names, replay.sizes, replay.parts, strict=True)
    }  # fmt: skip
    if STATE in groups:
        del groups[STATE]["device_pages"]  # its tiers begin in host memory
    same = sum(a == b for a, b in zip(outcome.hits, outcome.simulated, strict=True))
    prompts = counts["prompt_tokens"]
    return {
        "write": settings.write,
        "groups": groups,
        "counts": {name: n for name, n in counts.items() if "." not in name},
        "hit_rate": sum(outcome.hits) / prompts,
        "simulated_hit_rate": sum(outcome.simulated) / prompts,
        "requests_as_simulated": same,
        "wrong": outcome.wrong,
        "stats": outcome.stats,
    }


def render_mixed(point: dict[str, Any]) -> str:
    counts = point["counts"]
    rows = [
        (name, group.get("device_pages"), group["host_blocks"], group["disk_blocks"],
         group["page_bytes"], f"{group['checked_bytes']:,}", group["wrong_bytes"])
        for name, group in point["groups"].items()
    ]  # fmt: skip
    columns = ("group", "device pages", "host blocks", "disk blocks", "B/block", "B compared",
               "wrong")  # fmt: skip
    lines = [
        f"{counts['same_tokens']} of {counts['requests']} requests have equal tokens in both "
        f"services; {counts['plain_tokens']} tokens are those of a pass without a cache",
        f"{counts['hit_tokens']} of {counts['prompt_tokens']} prompt tokens were not computed: "
        f"{point['hit_rate']:.2%}, simulated {point['simulated_hit_rate']:.2%}; as simulated in "
        f"{point['requests_as_simulated']} of {counts['requests']} requests",
        *point["wrong"],
    ]
    if counts["cut"]:
        lines.append(f"{counts['cut']} blocks of prompts that are too long were not requested")
    return "\n\n".join([format_table(columns, rows), "\n".join(lines)])
