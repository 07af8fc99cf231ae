"""Kill a process that writes blocks, again and again, and count what it left in the file.

    python disk_killed.py PATH TIMES MODE

MODE: "whole" as the package is; "order" without checksums, so that the order of writes is all that
protects; "control" without checksums, and without emptying a slot before it is written, which must
give wrong blocks. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path

from disk_cases import contents, open_tier

from kvcupy.cache.tiered import disk, disk_format

NUM_SLOTS, PAGE_BYTES = 5, 1 << 20
BEGIN, END = 0, 1
REPORT = struct.Struct("<BBQ")  # begin or end of a write, slot, hash


def survey(path, times, mode, seed=0):
    """Kill a writer so many times, and count what the file serves after each."""
    if mode != "whole":
        disk_format.checksum = lambda *_: bytes(16)
    if mode == "control":
        disk.DiskTier._invalidate = lambda *_, **__: None
    rng = random.Random(f"{mode} {seed}")
    counts = {"kills": 0, "served": 0, "missed": 0, "wrong": 0, "lost": 0, "unfinished": 0}
    known = {}  # by slot, the hashes that it may have, and whether it must have one
    for _ in range(times):
        for event, slot, block_hash in killed(path, rng.randrange(2**32), rng.random() * 5e-3):
            if event == BEGIN:
                known[slot] = [*known.get(slot, ([],))[0], block_hash], False
            else:
                known[slot] = [block_hash], True
        counts["kills"] += 1
        counts["unfinished"] += sum(not must for _, must in known.values())
        look(path, known, counts)
    return counts


def killed(path, seed, seconds):
    """Let a child write for so long, kill it, and return what it reported."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            write_forever(path, write_end, random.Random(seed))
        finally:
            os._exit(1)
    os.close(write_end)
    reports = os.read(read_end, REPORT.size)  # it is at work
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child failed by itself"
    while more := os.read(read_end, 1 << 16):
        reports += more
    os.close(read_end)
    return list(REPORT.iter_unpack(reports))


def write_forever(path, report, rng):
    """Write new blocks, one at a time or several, and say so before and after."""
    tier = open_tier(path, NUM_SLOTS, PAGE_BYTES)
    while True:
        slots = rng.sample(range(NUM_SLOTS), rng.choice([1, 1, 3]))
        blocks = [(slot, rng.getrandbits(64)) for slot in slots]
        items = [
            (slot, block_hash, contents(block_hash, PAGE_BYTES)) for slot, block_hash in blocks
        ]
        os.write(report, b"".join(REPORT.pack(BEGIN, *block) for block in blocks))
        if len(items) == 1:
            tier.write(*items[0])
        else:
            assert tier.write_many(items) == [None] * len(items)
        os.write(report, b"".join(REPORT.pack(END, *block) for block in blocks))


def look(path, known, counts):
    """Open the file and count what it serves; remember what it has."""
    with open_tier(path, NUM_SLOTS, PAGE_BYTES) as tier:
        there = {slot: block_hash for block_hash, slot in tier.entries()}
        for slot, (hashes, must) in known.items():
            block_hash = there.get(slot)
            into = memoryview(bytearray(PAGE_BYTES))
            served = block_hash is not None and tier.read(slot, block_hash, into)
            counts["served" if served else "missed"] += 1
            right = block_hash in hashes and into == contents(block_hash, PAGE_BYTES)
            counts["wrong"] += served and not right
            counts["lost"] += must and not served
            known[slot] = ([block_hash] if served else []), served


if __name__ == "__main__":
    print(json.dumps(survey(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
