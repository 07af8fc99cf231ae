"""A plain simulation of the tiers of groups: lists of hashes, one request at a time.

After each request the device is emptied, so that a block is in host memory or lost.
"""

from __future__ import annotations

from groups_model import PAGE


class GroupReference:
    """The blocks of a group; the first of an order is evicted first."""

    def __init__(self, blocks, window, capacity):
        self.blocks, self.window, self.capacity = blocks, window, capacity
        self.device, self.host = [], []

    def use(self, hashes, new=()):
        """Blocks are used, or enter the device: the last of a prefix first."""
        for hash in reversed(hashes):
            for order in (self.device, self.host):
                if hash in order:
                    order.remove(hash)
                    order.append(hash)
            if hash in new and hash not in self.device:
                self.device.append(hash)

    def save(self, hash):
        """A state enters host memory."""
        if hash in self.host:
            self.host.remove(hash)
        elif len(self.host) == self.capacity:
            self.host.pop(0)
        self.host.append(hash)

    def empty_device(self):
        """All blocks move to host memory, which evicts others first, and else its first ones."""
        saves = [hash for hash in self.device if hash not in self.host]
        missing = len(saves) - (self.capacity - len(self.host))
        victims = [hash for hash in self.host if hash not in self.device][: max(0, missing)]
        if len(victims) < missing:
            victims = self.host[:missing]
        self.host = [hash for hash in self.host if hash not in victims]
        room = self.capacity - len(self.host)
        self.host += saves[max(0, len(saves) - room) :]
        self.device = []

    def has(self, hash):
        return hash in self.device or hash in self.host


class Reference:
    """What is cached of prompts, and how many blocks each request finds."""

    def __init__(self, groups):
        self.groups = groups
        self.attention = [g for g in groups if not g.blocks.is_state]
        self.states = [g for g in groups if g.blocks.is_state]
        self.chains = {}  # by hash, the hashes of the prefix that it ends

    def usable(self, chain):
        return all(
            len(chain) % group.blocks.interval == 0
            and all(group.has(chain[i]) for i in group.blocks.needed(len(chain)))
            for group in self.groups
        )

    def request(self, hashes, num_tokens, chunk):
        """Serve a prompt; return how many of its blocks were found."""
        self.chains |= {hash: hashes[: i + 1] for i, hash in enumerate(hashes)}
        found = max([n for n in range(1, len(hashes) + 1) if self.usable(hashes[:n])], default=0)
        for group in self.groups:
            needed = [hashes[i] for i in group.blocks.needed(found)]
            group.use(needed, () if group.blocks.is_state else needed)
        first = {group: 0 for group in self.attention}
        length = start = found * PAGE
        while length < num_tokens:
            start, length = length, min(num_tokens, length - length % chunk + chunk)
            for group in self.attention:
                for position in (start, max(start, length - PAGE)):
                    self.leave_behind(group, first, hashes, found, position)
            block = length // PAGE
            if length % (PAGE * self.groups[0].blocks.interval) == 0 and block <= len(hashes):
                for group in self.states:
                    group.save(hashes[block - 1])
        self.finish(first, hashes, found, length // PAGE)
        return found

    def leave_behind(self, group, first, hashes, found, position):
        """The pages that no query from `position` on sees go to the tiers."""
        if not group.window:
            return
        stop = (position - group.window + 1) // PAGE
        known = group.blocks.needed(found)
        new = []
        for i in range(max(first[group], group.blocks.num_first), min(stop, len(hashes))):
            if i >= found and group.blocks.can_serve(i):
                new.append(hashes[i])
        group.use(new, new)
        left = range(max(first[group], group.blocks.num_first), min(stop, found))
        group.use([hashes[i] for i in left if i in known])
        first[group] = max(first[group], stop)

    def finish(self, first, hashes, found, length):
        """A sequence ends: its blocks go to the tiers, as far as they are useful."""
        useful = min(length, len(hashes))
        useful -= useful % self.groups[0].blocks.interval
        while self.states and useful and not all(g.has(hashes[useful - 1]) for g in self.states):
            useful -= self.groups[0].blocks.interval
        for group in self.attention:
            sinks = range(min(first[group], group.blocks.num_first))
            kept = [*sinks, *range(first[group], length)]
            own = [hashes[i] for i in kept if found <= i < useful and group.blocks.can_serve(i)]
            group.use(own, own)
            group.use([hashes[i] for i in group.blocks.needed(found) if i in kept])
        self.discard()
        for group in self.attention:
            group.empty_device()
        self.discard()

    def discard(self):
        """Discard what no usable prefix needs."""
        usable = [chain for chain in self.chains.values() if self.usable(chain)]
        for group in self.groups:
            needed = {chain[i] for chain in usable for i in group.blocks.needed(len(chain))}
            group.device = [hash for hash in group.device if hash in needed]
            group.host = [hash for hash in group.host if hash in needed]
