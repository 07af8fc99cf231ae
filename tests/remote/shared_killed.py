"""Kill and stop processes that use a shared store, and count what the others see.

    python shared_killed.py FOLDER MODE [TIMES]

MODE: "steps", a writer is killed at each step of a put, and of the repair after that; "rounds",
writers and readers are killed at any time; "control", the same without checksums and with writers
that write before they mark a slot, which must give wrong blocks; "stopped", a writer is stopped
while it has the lock; "forked", a writer dies while a child that it has forked lives on. Prints
JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from shared_cases import Writer, block_hashes, fill, new_pool

import kvcupy as kv
from kvcupy.remote.stores import shm
from kvcupy.remote.stores.shm import Layout, ShmBackend
from kvcupy.remote.wire import WirePages

NUM_BLOCKS, WIDTH = 6, 4096  # a page is 256 KiB
STEPS = ("chosen", "erased", "marked", "odd", "piece", "described", "even", "inserted", "clean")
REPAIR_STEPS = ("emptied", "rebuilt")
HASHES = block_hashes(40)


def opened(folder, **options):
    page_bytes = 2 * 4 * 2 * 2 * WIDTH * 2
    capacity = Layout(page_bytes, NUM_BLOCKS).num_bytes
    return Writer(
        "shm:killed", width=WIDTH, num_pages=2, capacity_bytes=capacity, folder=folder, **options
    )


def child(function):
    """Fork, and run a function in the child; return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        function()
        os._exit(0)
    except BaseException as error:
        print(f"child: {error!r}", file=sys.stderr)
    finally:
        os._exit(1)


def ended(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def at_step(name, number, action):
    """Do something when a process comes to a step for the nth time."""
    count = Counter()

    def pause(backend, step):
        count[step] += 1
        if step == name and count[step] == number:
            action(backend)

    ShmBackend._at = pause


def kill_self(backend):
    os.kill(os.getpid(), signal.SIGKILL)


def reachable(user):
    """How many of the hashes are found, and how many can be read; those are right."""
    found = [h for h in HASHES if user.store.match([h])]
    return len(found), sum(user.get(h)[0] for h in found)


# --- Killed at each step of a put -----------------------------------------------------------------


def kill_at_steps(folder):
    """Return what was seen after a kill at each step."""
    report = []
    with opened(folder) as user:
        for step in STEPS:
            for repair in (None, *REPAIR_STEPS):
                report.append(kill_at_step(folder, user, step, 1, repair, per_lock=2))
            if step != "clean":  # once for both
                report.append(kill_at_step(folder, user, step, 2, None, per_lock=2))
            report.append(kill_at_step(folder, user, step, 2, None, per_lock=1))
    return report


def kill_at_step(folder, user, step, number, repair, *, per_lock):
    """Kill a writer of two blocks, of which it writes so many while it has the lock."""
    user.put(*HASHES[:NUM_BLOCKS][:2])
    for first in range(2, NUM_BLOCKS, 2):
        user.put(*HASHES[first : first + 2])
    recovered = user.store.stats()["recovered"]
    new = HASHES[NUM_BLOCKS : NUM_BLOCKS + 2]

    def write():
        with opened(folder) as other:
            other.store._backend.blocks_per_get = per_lock
            at_step(step, number, kill_self)
            other.put(*new)

    def fail_to_repair():
        with opened(folder) as other:
            at_step(repair, 1, kill_self)
            other.put(HASHES[20])

    def repair_and_write():
        with opened(folder) as other:
            assert other.put(HASHES[21]) == ["stored"], "the lock was not released"

    codes = [ended(child(write))]
    before = reachable(user)  # while nothing is repaired
    if repair is not None:
        codes.append(ended(child(fail_to_repair)))
        reachable(user)
    assert ended(child(repair_and_write)) == 0
    after = reachable(user)
    stats = user.store.stats()
    result = {
        "step": step, "number": number, "per_lock": per_lock, "repair": repair, "killed": codes,
        "found_before": before[0], "read_before": before[1], "found": after[0], "read": after[1],
        "blocks": stats["blocks"], "recovered": stats["recovered"] - recovered,
        "new": [user.get(h)[0] for h in new],
    }  # fmt: skip
    user.store.remove()
    user.store.close()
    user.__dict__.update(opened(folder).__dict__)
    return result


# --- Killed at any time ---------------------------------------------------------------------------


class User:
    """A store over a pool that has all blocks already, so that most of the time goes to the store.

    Each process opens its own.
    """

    def __init__(self, folder, options):
        self.pool = pool = new_pool(len(HASHES) + 1, head_dim=WIDTH)
        fill(pool, range(len(HASHES)), HASHES)
        self.pages = WirePages(pool)
        capacity = Layout(pool.page_bytes, len(HASHES) // 2).num_bytes
        self.store = kv.SharedStore.open(
            "shm:killed", pool, capacity_bytes=capacity, folder=folder, **options
        )

    def step(self, rng, counts):
        """Put two blocks, or get two."""
        numbers = rng.sample(range(len(HASHES)), 2)
        if rng.random() < 0.5:
            self.store.put([HASHES[n] for n in numbers], numbers)
        else:
            self.look(numbers, counts)

    def look(self, numbers, counts):
        """Get blocks, and count those that are missing, right and wrong."""
        for n in numbers:
            into = len(HASHES)
            hit = self.store.get([HASHES[n]], [into])[0]
            pairs = zip(self.pages.pieces(into), self.pages.pieces(n), strict=True)
            whole = hit and all(
                np.array_equal(np.frombuffer(got, np.uint8), np.frombuffer(expected, np.uint8))
                for got, expected in pairs
            )
            counts[0 if not hit else 1 if whole else 2] += 1


def work(folder, seed, step, counts, options):
    """Use a store until it comes to a step, or for ever."""
    shm._MIN_THREADED_BYTES = 0  # two threads copy the two blocks
    user, rng = User(folder, {**options, "threads": 2}), random.Random(seed)
    if step is not None:
        at_step(step, rng.randrange(1, 6), kill_self)
    while True:
        user.step(rng, counts)
        counts[3] += 1


def kill_rounds(folder, times, *, control=False):
    """Kill two users of three at random moments, so many times."""
    options = {"threads": 1}  # so that none is there when it forks
    if control:
        options["checksum"] = "none"
        ShmBackend._reserve = write_before_marking
    counts = memoryview(mmap.mmap(-1, 4096)).cast("Q")  # four of each process
    rng = random.Random(f"rounds {control}")
    user = User(folder, options)
    for _ in range(times):
        # One kills itself at a step, the other is killed whenever it may be.
        step, seeds = "piece" if control else rng.choice(STEPS), (rng.random(), rng.random())
        dying, other = (
            child(lambda a=at, s=step, r=seed: work(folder, r, s, counts[a : a + 4], options))
            for at, step, seed in ((0, step, seeds[0]), (4, None, seeds[1]))
        )
        counts[7] = 0
        pause_s = rng.random() * 0.02
        while not counts[7]:  # it is at work
            user.step(rng, counts[8:12])
        end = time.monotonic() + pause_s
        while time.monotonic() < end:
            user.step(rng, counts[8:12])
        os.kill(other, signal.SIGKILL)
        for process in (dying, other):
            assert ended(process) == -signal.SIGKILL, "a child failed by itself"
        user.look(range(len(HASHES)), counts[8:12])
    more = block_hashes(1, 1000)
    assert control or user.store.put(more, [0]) == ["stored"]  # which repairs what the last left
    assert control or user.store.get(more, [len(HASHES)]) == [True]
    stats = user.store.stats()
    known = [h for h in (*HASHES, *more) if user.store.match([h])]
    there = [user.store.get([h], [len(HASHES)])[0] for h in known]
    missed, right, wrong = (sum(counts[n + k] for n in (0, 4, 8)) for k in range(3))
    return {
        "kills": 2 * times, "missed": missed, "right": right, "wrong": wrong, "found": len(known),
        "read": sum(there), "blocks": stats["blocks"], "recovered": stats["recovered"],
        "torn": stats["torn"],
    }  # fmt: skip


def write_before_marking(backend, put, number, reserve=ShmBackend._reserve):
    """Write a block over one that is still found, and do what belongs before that afterwards."""
    full = backend._words[shm._HIGH_WATER] == backend._layout.num_slots
    victim = backend._victim(put.kept) if full else None
    if victim is not None:
        start = backend._layout.payload_at(victim)
        for piece in put.blocks[number]:
            backend._bytes[start : start + len(piece)] = piece
            start += len(piece)
            backend._at("piece")
        backend._words[shm._HAND] = victim
    return reserve(backend, put, number)


# --- Stopped, and forked --------------------------------------------------------------------------


def stop_a_writer(folder):
    """Stop a writer that has the lock; return what the others can do then, and after."""
    result = {}
    with opened(folder) as user:
        user.put(*HASHES[:2])

        def write():
            with opened(folder) as other:
                at_step("piece", 1, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
                assert other.put(HASHES[5], HASHES[6]) == ["stored"] * 2

        writer = child(write)
        try:
            _, status = os.waitpid(writer, os.WUNTRACED)
            result["stopped"] = os.WIFSTOPPED(status)
            result["read"] = user.get(*HASHES[:2])
            result["being_written"] = user.get(HASHES[5])
            result["exists"] = user.store.match(HASHES[:2])
            user.store._deadline_s = 0.2
            started = time.monotonic()
            result["put"] = user.put(HASHES[7])
            result["known"] = user.put(HASHES[0])
            result["waited_s"] = time.monotonic() - started
            user.store._deadline_s = 60.0
            started = time.monotonic()
            result["put_again"] = [user.put(HASHES[7], HASHES[8]) for _ in range(3)]
            result["waited_again_s"] = time.monotonic() - started
            result["read_again"] = user.get(*HASHES[:2])
            result["stats"] = user.store.stats()
            user.store._deadline_s = 0.2
            try:
                user.store.remove()
            except ConnectionError as error:
                result["remove"] = str(error)
            user.store._deadline_s = 60.0
        finally:
            os.kill(writer, signal.SIGCONT)
        result["writer"] = ended(writer)
        result["after"] = user.get(HASHES[5], HASHES[6])
        result["put_after"] = user.put(HASHES[7])
        result["recovered"] = user.store.stats()["recovered"]
    return result


def leave_a_child(folder):
    """Kill a process that has the lock and has forked meanwhile; return whether others get it."""
    result = {}
    read_end, write_end = os.pipe()

    def use_parents_store(user):
        answers = []
        for call in (
            lambda: user.store.match(HASHES), lambda: user.store.put([HASHES[8]], [0]),
            lambda: user.store.stats(), lambda: user.store.remove(),
        ):  # fmt: skip
            try:
                call()
                answers.append("")
            except kv.KvcupyError as error:
                answers.append(str(error))
        user.store.close()
        with opened(folder) as own:
            answers.append(own.store.match(HASHES[:1]))
        os.write(write_end, json.dumps(answers).encode())
        time.sleep(600)  # killed below

    def write():
        with opened(folder) as other:

            def fork_and_die(backend):
                process = child(lambda: use_parents_store(other))
                os.write(write_end, process.to_bytes(8, "little"))
                os.kill(os.getpid(), signal.SIGKILL)

            at_step("piece", 1, fork_and_die)
            other.put(HASHES[5])

    with opened(folder) as user:
        user.put(HASHES[0])
        result["writer"] = ended(child(write))
        orphan = int.from_bytes(os.read(read_end, 8), "little")
        try:
            result["answers"] = json.loads(os.read(read_end, 1 << 16))
            user.store._deadline_s = 60.0
            result["put"] = user.put(HASHES[6])
            result["recovered"] = user.store.stats()["recovered"]
        finally:
            os.kill(orphan, signal.SIGKILL)
    return result


def main(folder, mode, times="0"):
    if mode == "steps":
        return kill_at_steps(Path(folder))
    if mode == "rounds":
        return kill_rounds(Path(folder), int(times))
    if mode == "control":
        return kill_rounds(Path(folder), int(times), control=True)
    return {"stopped": stop_a_writer, "forked": leave_a_child}[mode](Path(folder))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
