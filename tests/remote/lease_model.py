"""A model of page migration: leases, generations, quarantine, late READs, crashes.

Each step stands for one atomic action of `kvcupy.remote.migration`, and each guard in `GUARDS` for
a condition in that code; a model without some guards shows what they prevent. An offer has one page
with one layer, and a pull one READ: pages and layers of one pull share its fate.

Senders number their offers from 1 again when they restart at the same address. Tickets stay in the
world: any receiver may pull any ticket at any time, even if its sender has died.
Connections deliver messages late, in order, or lose them when they are cut. A process that is
stopped takes no step for a while, which every interleaving includes; that pages come back without
it is checked by paths without its steps.

Time is abstract. A lease may expire, a deadline pass, and an idle connection be closed at any step,
so no property here depends on the RENEW of a receiver, nor on the maximum of a lease: they only
decide how often pulls succeed. The pause before another attempt to connect is no step either.
Not modelled: authentication, `close`, pulls from several senders, staging, checksums that are
computed ahead, and streams that still use a destination.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

from state_space import Step, Violation

GUARDS = {
    "sender_id": "PageReceiver._connect compares the id of the sender with the ticket's",
    "open_offers": "PageSender._claim looks among the open offers",
    "generation": "PageSender._claim compares the generation, which the end of an offer changes",
    "token": "PageSender._claim compares the token",
    "num_pulls": "PageSender._claim counts pulls completed and in progress",
    "written": "PageSender._settle waits until all layers are written",
    "is_ready": "Service.is_ready: a layer is announced once it is written",
    "channels": "PageSender._settle waits for the pulls in progress",
    "is_released": "PageSender._settle frees once",
    "expiry": "PageSender._keep ends offers whose lease is over",
    "check": "Service.check: serving ends with the offer",
    "refusal": "PageSender._serve refuses, and closes the connection of, a pull that it abandons",
    "confirmation": "NixlEngine.pull waits for the sender's CHECKSUM after each READ",
    "checksum": "_Verification._compare, SocketEngine.pull",
    "read_failure": "_Reader._end_read raises the failure of a READ",
    "confirming": "PageReceiver._granted receives the CONFIRMED of the pull before",
    "deadline": "Pull: the deadline fails it",
    "every_read": "_Reader.pending has all READs, not only the one that failed",
    "quiet": "PageReceiver._run waits for NixlEngine.quiet before the pages are let go",
    "busy": "PageAllocator._mark_busy holds back freed pages until `Landing` is done",
}


class Offer(NamedTuple):
    """An offer; its position among the offers at an address is its token and generation."""

    life: int  # of the sender
    number: int
    page: int
    written: bool = False
    ended: bool = False
    released: bool = False
    completed: int = 0


class Sender(NamedTuple):
    """What listens on an address."""

    life: int  # the sender's id; a restart changes it
    offers: tuple[Offer, ...]  # all that were ever made at this address


class Pull(NamedTuple):
    """A pull; its position at the receiver is its destination page.

    Phases: "asked", "granted", "read" (the READ is over, unconfirmed), "completed", "failed".
    """

    sender: int
    offer: int
    phase: str
    attempts: int = 0  # to connect, until the grant; 0 over a connection that was idle
    was_lost: bool = False  # whether a connection was lost before the grant
    source: int = -1  # offer that the sender granted
    in_flight: int = 0  # READs, or messages with data, that may still land in the page
    data: int = 0  # bytes in flight, if the sender has sent them
    content: int = 0  # of the page: 0 undefined, else 1 + offer
    let_go: bool = False  # whether a failed pull no longer waits for READs in flight
    freed: bool = False  # by the caller, while held back


NO_PULL = ()


class Connection(NamedTuple):
    """A connection, with the messages in flight (kind, number of the request, ...)."""

    receiver: int
    sender: int
    life: int
    up: tuple[tuple, ...] = ()
    down: tuple[tuple, ...] = ()
    pull: int = -1  # page of the pull that uses it, or -1 if idle
    request: int = 0  # number of the last request
    confirming: bool = False
    serving: int = -1  # offer that the sender's thread serves
    stage: str = ""  # "claimed", "checked", "unread", "sent"
    receiver_open: bool = True
    sender_open: bool = True
    alive: bool = True  # until the network loses it


class Stray(NamedTuple):
    """A READ that outlives the pull that began it: only without some guards."""

    receiver: int
    page: int


class State(NamedTuple):
    """A state; `left` has the numbers of offers, pulls, crashes, cuts and faults to come."""

    senders: tuple[Sender, ...]
    receivers: tuple[tuple[Pull | tuple[()], ...], ...]
    connections: tuple[Connection, ...]
    strays: tuple[Stray, ...]
    left: tuple[int, ...]


OFFERS, PULLS, CRASHES, CUTS, FLIPS, FAILURES = range(6)

# Causes of steps. Steps of users, crashes and faults need not happen. The stream that writes an
# offer counts as the sender, and the caller who frees a page as the receiver.
USER, CRASH, FAULT, SENDER, RECEIVER, NETWORK, LANDING = (
    "user", "crash", "fault", "sender", "receiver", "network", "landing",
)  # fmt: skip


class Wrong(Exception):
    """A step violates a property."""


def replaced(items, number, item):
    return (*items[:number], item, *items[number + 1 :])


class LeaseModel:
    """Senders and receivers, and what they may do.

    Parameters
    ----------
    engine : "nixl" or "socket"
    senders, receivers : their numbers
    sender_pages, receiver_pages : pages of each pool
    offers, pulls, crashes, cuts, flips, failures : numbers of these events, of all processes
        together: of offers, pulls, killed processes, cut connections, READs whose bytes are
        flipped, and READs that fail
    num_pulls : pulls that complete an offer
    reads : READs of a pull
    attempts : maximum number of attempts to connect, until a pull is granted
    without : names of guards that are missing
    """

    def __init__(
        self, engine="nixl", *, senders=2, receivers=2, sender_pages=1, receiver_pages=1, offers=2,
        pulls=2, crashes=1, cuts=0, flips=0, failures=0, num_pulls=1, reads=1, attempts=3,
        without=(),
    ):  # fmt: skip
        assert set(without) <= set(GUARDS)
        self.is_nixl = engine == "nixl"
        self.num_senders, self.num_receivers = senders, receivers
        self.sender_pages, self.receiver_pages = sender_pages, receiver_pages
        self.budget = offers, pulls, crashes, cuts, flips, failures
        self.num_pulls, self.reads = num_pulls, reads if self.is_nixl else 1
        self.attempts = attempts
        self.guards = set(GUARDS) - set(without)
        self._permutations = [
            (order, others)
            for order in itertools.permutations(range(senders))
            for others in itertools.permutations(range(receivers))
        ][1:]

    def initial(self):
        return State(
            (Sender(0, ()),) * self.num_senders,
            ((NO_PULL,) * self.receiver_pages,) * self.num_receivers, (), (), self.budget,
        )  # fmt: skip

    def canonical(self, state):
        """Return the least of the states that differ only in the numbers of processes."""
        same = [self._permuted(state, *each) for each in self._permutations]
        return min(state, *same) if same else state

    def _permuted(self, state, order, others):
        """Give sender `i` the number `order[i]`, and receiver `i` the number `others[i]`."""
        senders, receivers = list(state.senders), list(state.receivers)
        for old, new in enumerate(order):
            senders[new] = state.senders[old]
        for old, new in enumerate(others):
            receivers[new] = with_senders(state.receivers[old], order)
        connections = [between_others(each, order, others) for each in state.connections]
        strays = (each._replace(receiver=others[each.receiver]) for each in state.strays)
        return State(
            tuple(senders),
            tuple(receivers),
            tuple(sorted(connections)),
            tuple(sorted(strays)),
            state.left,
        )

    def steps(self, state):
        """Yield every (step, next state), or (step, Violation)."""
        for text, cause, action, *arguments in self.enabled(state):
            try:
                following = action(state, *arguments)
            except Wrong as wrong:
                yield Step(text, cause), Violation(*wrong.args)
                continue
            yield Step(text, cause), cleaned(following)

    def enabled(self, state):
        """Yield (text, cause, action, arguments) of every step that is possible."""
        left = state.left
        for s, sender in enumerate(state.senders):
            if left[OFFERS] and self._free_page(state, s) is not None:
                yield f"sender {s} offers a page", USER, self.offer, s
            for k, offer in enumerate(sender.offers):
                if offer.life != sender.life:
                    continue
                name = f"offer {offer.number} of sender {s}"
                if not offer.written:
                    yield f"{name} is written", SENDER, self.write, s, k
                if not offer.ended:
                    yield f"{name} is withdrawn", USER, self.end, s, k
                    if "expiry" in self.guards:
                        yield f"the lease of {name} expires", SENDER, self.end, s, k
            if left[CRASHES] and sender.offers and sender.offers[-1].life == sender.life:
                yield f"sender {s} is killed and restarts", CRASH, self.kill_sender, s
        for r, pulls in enumerate(state.receivers):
            if left[PULLS] and NO_PULL in pulls:
                for s, sender in enumerate(state.senders):
                    for k, offer in enumerate(sender.offers):
                        text = f"receiver {r} pulls {ticket_name(s, offer)} into page"
                        yield f"{text} {pulls.index(NO_PULL)}", USER, self.pull, r, s, k
            for i, pull in enumerate(pulls):
                if pull:
                    yield from self._enabled_by_pull(state, r, i, pull)
            if left[CRASHES] and any(pulls):
                yield f"receiver {r} is killed and restarts", CRASH, self.kill_receiver, r
        for n, connection in enumerate(state.connections):
            yield from self._enabled_on(state, n, connection)
        for stray in state.strays:
            text = f"the READ of a given-up pull lands in page {stray.page} of receiver"
            yield f"{text} {stray.receiver}", LANDING, self.land_stray, stray

    def _enabled_by_pull(self, state, r, i, pull):
        name = f"the pull into page {i} of receiver {r}"
        if pull.phase in ("asked", "granted", "read"):
            yield f"{name} is cancelled", USER, self.fail, r, i
            if "deadline" in self.guards:
                yield f"the deadline of {name} passes", RECEIVER, self.fail, r, i
        elif not pull.freed:
            yield f"the caller frees page {i} of receiver {r}", RECEIVER, self.free, r, i
        if pull.in_flight:
            what = "READ" if self.is_nixl else "data"
            yield f"a {what} of {name} lands", LANDING, self.land, r, i, None
            if state.left[FLIPS]:
                yield f"a {what} of {name} lands with flipped bits", FAULT, self.land, r, i, -1
            if state.left[FAILURES] and self.is_nixl:
                yield f"a READ of {name} fails", FAULT, self.read_fails, r, i

    def _enabled_on(self, state, n, c):
        name = f"between receiver {c.receiver} and sender {c.sender}"
        if c.alive and state.left[CUTS]:
            yield f"the connection {name} is cut", FAULT, self.cut, n
        if c.sender_open:
            if c.up:
                text = f"sender {c.sender} receives {c.up[0][0]} of receiver {c.receiver}"
                yield text, NETWORK, self.sender_receives, n
            elif not (c.alive and c.receiver_open):
                yield f"sender {c.sender} notices the end {name}", NETWORK, self.sender_leaves, n
            elif c.serving < 0:
                text = f"sender {c.sender} closes the idle connection to receiver {c.receiver}"
                yield text, USER, self.close_idle, n
            if c.serving >= 0:
                offer = state.senders[c.sender].offers[c.serving]
                if offer.ended and "check" in self.guards:
                    # A thread that waits for DONE is woken by an abort of its connection.
                    verb, action = ("aborts", self.abort) if c.stage == "sent" else (
                        "refuses", self.refuse)  # fmt: skip
                    text = f"sender {c.sender} {verb} the pull of offer {offer.number}, which ended"
                    yield text, SENDER, action, n
                elif c.stage == "claimed" and (offer.written or "is_ready" not in self.guards):
                    verb = "grants" if self.is_nixl else "looks at"
                    text = f"sender {c.sender} {verb} offer {offer.number}"
                    yield f"{text} for receiver {c.receiver}", SENDER, self.grant, n
                if c.stage == "checked":
                    text = f"sender {c.sender} sends offer {offer.number} to receiver {c.receiver}"
                    yield text, SENDER, self.send, n
        if c.receiver_open:
            if c.down and c.pull >= 0:
                text = f"receiver {c.receiver} receives {c.down[0][0]} of sender {c.sender}"
                yield text, NETWORK, self.receiver_receives, n
            elif not c.down and not (c.alive and c.sender_open):
                text = f"receiver {c.receiver} notices the end {name}"
                yield text, NETWORK, self.receiver_notices, n

    # --- Parts of states ---

    def _free_page(self, state, s):
        life, offers = state.senders[s]
        used = {o.page for o in offers if o.life == life and not o.released}
        return next((page for page in range(self.sender_pages) if page not in used), None)

    def _content(self, state, s, k):
        """Return what the page of an offer holds now: 0 if it is undefined, or 1 + an offer."""
        life, offers = state.senders[s]
        if offers[k].life != life:
            return 0
        return next(
            (number + 1 for number, o in enumerate(offers)
             if o.life == life and o.page == offers[k].page and o.written and not o.released),
            0,
        )  # fmt: skip

    def _with_offer(self, state, s, k, **changes):
        sender = state.senders[s]
        offers = replaced(sender.offers, k, sender.offers[k]._replace(**changes))
        return state._replace(senders=replaced(state.senders, s, sender._replace(offers=offers)))

    def _with_pull(self, state, r, i, pull):
        pulls = replaced(state.receivers[r], i, pull)
        return state._replace(receivers=replaced(state.receivers, r, pulls))

    def _with_connection(self, state, n, **changes):
        changed = state.connections[n]._replace(**changes)
        return state._replace(connections=replaced(state.connections, n, changed))

    def _spent(self, state, what):
        return state._replace(left=replaced(state.left, what, state.left[what] - 1))

    def _connection_of(self, state, r, i):
        for n, c in enumerate(state.connections):
            if c.receiver == r and c.pull == i and c.receiver_open:
                return n
        return None

    def _down(self, state, n, *message):
        c = state.connections[n]
        if not (c.alive and c.receiver_open):
            return state
        return self._with_connection(state, n, down=(*c.down, message))

    def _up(self, state, n, *message):
        c = state.connections[n]
        if not (c.alive and c.sender_open):
            return state
        return self._with_connection(state, n, up=(*c.up, message))

    # --- Offers ---

    def offer(self, state, s):
        life, offers = state.senders[s]
        number = 1 + sum(offer.life == life for offer in offers)
        offer = Offer(life, number, self._free_page(state, s))
        sender = Sender(life, (*offers, offer))
        return self._spent(state._replace(senders=replaced(state.senders, s, sender)), OFFERS)

    def write(self, state, s, k):
        """The sender's stream writes the page, and the layer is announced."""
        if state.senders[s].offers[k].released:
            raise Wrong("late write", f"offer {k} of sender {s} is written into a freed page")
        return self._settle(self._with_offer(state, s, k, written=True), s, k)

    def end(self, state, s, k):
        if state.senders[s].offers[k].ended:
            return state
        return self._settle(self._with_offer(state, s, k, ended=True), s, k)

    def _settle(self, state, s, k):
        offer = state.senders[s].offers[k]
        is_read = "channels" in self.guards and self._num_channels(state, s, k)
        unwritten = "written" in self.guards and not offer.written
        if not offer.ended or is_read or unwritten:
            return state
        if offer.released:
            if "is_released" in self.guards:
                return state
            raise Wrong("freed twice", f"page {offer.page} of sender {s}")
        return self._with_offer(state, s, k, released=True)

    def _num_channels(self, state, s, k):
        return sum(c.sender == s and c.serving == k and c.sender_open for c in state.connections)

    # --- Crashes ---

    def kill_sender(self, state, s):
        life, offers = state.senders[s]
        gone = tuple(
            Offer(o.life, o.number, 0, written=True, ended=True, released=True) for o in offers
        )
        connections = tuple(
            c._replace(sender_open=False, up=(), serving=-1, stage="") if c.sender == s else c
            for c in state.connections
        )
        return self._spent(
            state._replace(
                senders=replaced(state.senders, s, Sender(life + 1, gone)), connections=connections
            ),
            CRASHES,
        )

    def kill_receiver(self, state, r):
        """Its memory is gone, and READs with it."""
        connections = tuple(
            c._replace(receiver_open=False, down=(), pull=-1) if c.receiver == r else c
            for c in state.connections
        )
        receivers = replaced(state.receivers, r, (NO_PULL,) * self.receiver_pages)
        strays = tuple(each for each in state.strays if each.receiver != r)
        return self._spent(
            state._replace(receivers=receivers, connections=connections, strays=strays), CRASHES
        )

    def cut(self, state, n):
        return self._spent(self._with_connection(state, n, alive=False, up=(), down=()), CUTS)

    def close_idle(self, state, n):
        """The sender evicts a connection, or it has been idle too long."""
        return self._with_connection(state, n, sender_open=False)

    # --- The sender's thread of a connection ---

    def sender_receives(self, state, n):
        (kind, request, *what), *rest = state.connections[n].up
        state = self._with_connection(state, n, up=tuple(rest))
        c = state.connections[n]
        if kind == "PULL":
            return self._claim(state, n, request, *what)
        if c.serving < 0:  # only if it has abandoned the pull without a word
            return state
        s, k = c.sender, c.serving
        offer = state.senders[s].offers[k]
        if offer.ended and "check" in self.guards:
            return self.refuse(state, n)
        if kind == "READ":
            state = self._down(state, n, "CHECKSUM", request, k, self._content(state, s, k))
            return self._with_connection(state, n, stage="sent")
        state = self._with_connection(state, n, serving=-1, stage="")
        state = self._with_offer(state, s, k, completed=offer.completed + 1)
        if offer.completed + 1 >= self.num_pulls:
            state = self.end(state, s, k)
        state = self._settle(state, s, k)
        return self._down(state, n, "CONFIRMED", request)

    def _claim(self, state, n, request, k):
        c = state.connections[n]
        sender = state.senders[c.sender]
        asked, is_taken = sender.offers[k], False
        for number, offer in enumerate(sender.offers):
            if offer.life != sender.life or offer.number != asked.number:
                continue
            if offer.ended and "open_offers" in self.guards:
                is_taken = offer.completed >= self.num_pulls
                continue
            if (number != k or offer.ended) and "generation" in self.guards:
                continue
            if number != k and "token" in self.guards:
                continue
            count = offer.completed + self._num_channels(state, c.sender, number)
            if count >= self.num_pulls:
                if "num_pulls" in self.guards:
                    is_taken = True
                    continue
                raise Wrong("too many pulls", f"{count + 1} of offer {number}")
            return self._with_connection(state, n, serving=number, stage="claimed")
        # The reason makes a difference only if a connection was lost before.
        is_retried = c.pull >= 0 and state.receivers[c.receiver][c.pull].was_lost and is_taken
        return self._down(state, n, "REFUSED", request, is_retried)

    def grant(self, state, n):
        c = state.connections[n]
        if self.is_nixl:
            state = self._down(state, n, "GRANT", c.request, c.serving, 0)
            return self._with_connection(state, n, stage="unread")
        return self._with_connection(state, n, stage="checked")

    def send(self, state, n):
        """Send the bytes over the connection, with their checksum."""
        c = state.connections[n]
        data = self._content(state, c.sender, c.serving)
        state = self._down(state, n, "GRANT", c.request, c.serving, data)
        return self._with_connection(state, n, stage="sent")

    def refuse(self, state, n):
        if "refusal" in self.guards:
            state = self._down(state, n, "REFUSED", state.connections[n].request, False)
        return self.sender_leaves(state, n)

    def abort(self, state, n):
        return self.sender_leaves(state, n)

    def sender_leaves(self, state, n):
        """Record a pull as lost or refused, and close the connection."""
        c = state.connections[n]
        is_open = "refusal" not in self.guards and c.alive and c.receiver_open
        up = c.up if is_open else ()
        state = self._with_connection(state, n, sender_open=is_open, serving=-1, stage="", up=up)
        return self._settle(state, c.sender, c.serving) if c.serving >= 0 else state

    # --- The receiver's thread of a pull ---

    def pull(self, state, r, s, k):
        i = state.receivers[r].index(NO_PULL)
        state = self._spent(self._with_pull(state, r, i, Pull(s, k, "asked")), PULLS)
        life = state.senders[s].offers[k].life
        for n, c in enumerate(state.connections):
            is_same = c.receiver == r and c.sender == s
            if "sender_id" in self.guards:
                is_same = is_same and c.life == life
            if is_same and c.pull < 0 and c.receiver_open and c.request:
                state = self._with_connection(state, n, pull=i, request=c.request + 1)
                return self._up(state, n, "PULL", c.request + 1, k)
        return self._connected(state, r, i)

    def _connected(self, state, r, i):
        """Connect to what listens on the address, and ask for the pages."""
        pull = state.receivers[r][i]
        s, k = pull.sender, pull.offer
        state = self._with_pull(state, r, i, pull._replace(attempts=pull.attempts + 1))
        sender = state.senders[s]
        if "sender_id" in self.guards and sender.offers[k].life != sender.life:
            return self.fail(state, r, i)
        connection = Connection(r, s, sender.life, up=(("PULL", 1, k),), pull=i, request=1)
        return state._replace(connections=(*state.connections, connection))

    def receiver_receives(self, state, n):
        (kind, request, *what), *rest = state.connections[n].down
        state = self._with_connection(state, n, down=tuple(rest))
        c = state.connections[n]
        r, i = c.receiver, c.pull
        pull = state.receivers[r][i]
        if c.confirming and "confirming" in self.guards:
            if kind == "CONFIRMED":
                return self._with_connection(state, n, confirming=False)
            return self._reconnected(state, n)
        if kind == "CONFIRMED":
            return self._reconnected(state, n)
        if request != c.request:
            raise Wrong("older answer", f"{kind} of the pull before ends the pull into page {i}")
        if kind == "REFUSED":
            # The sender may have yet to notice the end of the connection of an earlier attempt.
            return self._reconnected(state, n) if what == [True] else self.fail(state, r, i)
        granted, data = what
        if kind == "GRANT":
            if granted != pull.offer:
                raise Wrong(
                    "older generation", f"a pull of ticket {pull.offer} is granted offer {granted}"
                )
            taken = pull._replace(
                phase="granted", attempts=0, was_lost=False, source=granted, in_flight=self.reads,
                data=data,
            )  # fmt: skip
            return self._with_pull(state, r, i, taken)
        if "checksum" in self.guards and (granted, data) != (pull.offer, pull.content):
            return self.fail(state, r, i)
        return self._arrived(state, r, i)

    def _reconnected(self, state, n):
        """Close a connection that was lost before the grant, and ask over a new one."""
        c = state.connections[n]
        if state.receivers[c.receiver][c.pull].attempts >= self.attempts:
            return self.fail(state, c.receiver, c.pull)
        state = self._with_connection(state, n, receiver_open=False, pull=-1, down=())
        pull = state.receivers[c.receiver][c.pull]._replace(was_lost=True)
        return self._connected(self._with_pull(state, c.receiver, c.pull, pull), c.receiver, c.pull)

    def receiver_notices(self, state, n):
        """Notice that the connection has ended."""
        c = state.connections[n]
        if c.pull >= 0:
            if state.receivers[c.receiver][c.pull].phase == "asked":
                return self._reconnected(state, n)
            return self.fail(state, c.receiver, c.pull)
        return self._with_connection(state, n, receiver_open=False)

    def land(self, state, r, i, flipped):
        """Bytes land in the page of a pull; the thread of the pull sees the end of the READ."""
        pull = state.receivers[r][i]
        if flipped is not None:
            state, content = self._spent(state, FLIPS), flipped
        elif self.is_nixl:
            content = self._content(state, pull.sender, pull.source)
        else:
            content = pull.data
        return self._read_ended(state, r, i, content)

    def read_fails(self, state, r, i):
        state = self._spent(state, FAILURES)
        pull = state.receivers[r][i]
        if pull.phase != "granted" or "read_failure" not in self.guards:
            return self._read_ended(state, r, i, 0)
        pull = pull._replace(in_flight=pull.in_flight - 1, let_go="every_read" not in self.guards)
        return self.fail(self._with_pull(state, r, i, pull), r, i)

    def _read_ended(self, state, r, i, content):
        pull = state.receivers[r][i]
        if pull.in_flight < self.reads and content != pull.content:
            content = -1  # of READs with different bytes
        pull = pull._replace(in_flight=pull.in_flight - 1, content=content)
        if pull.freed and not pull.in_flight:
            return self._with_pull(state, r, i, NO_PULL)
        if pull.phase == "failed":
            pull = settled(pull)
        state = self._with_pull(state, r, i, pull)
        if pull.phase == "failed" or pull.in_flight:
            return state
        if self.is_nixl and "confirmation" in self.guards:
            state = self._with_pull(state, r, i, pull._replace(phase="read"))
            n = self._connection_of(state, r, i)
            return self._up(state, n, "READ", state.connections[n].request)
        if not self.is_nixl and "checksum" in self.guards and pull.data != content:
            return self.fail(state, r, i)
        return self._arrived(state, r, i)

    def land_stray(self, state, stray):
        raise Wrong(
            "late landing",
            f"page {stray.page} of receiver {stray.receiver} is free, or in the hands of others",
        )

    def _arrived(self, state, r, i):
        """The pull has completed: its bytes are used from now on."""
        pull = state.receivers[r][i]
        if pull.content != 1 + pull.offer:
            kind = "bytes of another offer" if pull.content > 0 else "wrong bytes"
            raise Wrong(kind, f"page {i} of receiver {r} has content {pull.content}")
        n = self._connection_of(state, r, i)
        state = self._with_pull(state, r, i, settled(pull._replace(phase="completed")))
        state = self._up(state, n, "DONE", state.connections[n].request)
        return self._with_connection(state, n, pull=-1, confirming=True)

    def fail(self, state, r, i):
        """Fail a pull, if it has not ended, and abort its connection."""
        pull = state.receivers[r][i]
        n = self._connection_of(state, r, i)
        if n is not None:
            state = self._with_connection(state, n, receiver_open=False, pull=-1, down=())
        return self._with_pull(state, r, i, settled(pull._replace(phase="failed")))

    def free(self, state, r, i):
        """The caller frees the page of a pull that has ended."""
        pull = state.receivers[r][i]
        if not pull.in_flight:
            return self._with_pull(state, r, i, NO_PULL)
        if {"quiet", "busy"} <= self.guards and not pull.let_go:
            return self._with_pull(state, r, i, pull._replace(freed=True))
        state = self._with_pull(state, r, i, NO_PULL)
        strays = (*state.strays, *(Stray(r, i),) * pull.in_flight)
        return state._replace(strays=tuple(sorted(strays)))


@cache
def with_senders(pulls, order):
    """Renumber the senders of a receiver's pulls."""
    return tuple(pull and pull._replace(sender=order[pull.sender]) for pull in pulls)


@cache
def between_others(connection, order, others):
    """Renumber the ends of a connection."""
    sender, receiver = order[connection.sender], others[connection.receiver]
    return connection._replace(sender=sender, receiver=receiver)


def settled(pull):
    """Forget what no longer matters about a pull that has ended."""
    if pull.in_flight:
        return pull._replace(content=0)
    return Pull(pull.sender, pull.offer, pull.phase, freed=pull.freed)


def cleaned(state):
    """Drop connections that hold nothing, and put the others in order."""
    connections = state.connections
    if len(connections) > 1 or (connections and not is_used(connections[0])):
        return state._replace(connections=tuple(sorted(filter(is_used, connections))))
    return state


def is_used(c):
    """Return whether a connection can still change anything: an idle one whose other end is closed
    only waits to be closed."""
    return c.sender_open or (c.receiver_open and (c.pull >= 0 or c.confirming))


def ticket_name(s, offer):
    return f"ticket {offer.number} of life {offer.life} of sender {s}"


# --- Properties of the whole state space ---


def senders_are_free(state):
    """Whether every sender has all its pages."""
    return all(
        offer.released or offer.life != life
        for life, offers in state.senders for offer in offers
    )  # fmt: skip


def receivers_are_free(state):
    return not any(map(any, state.receivers))


LIVENESS = {
    "all pages": (
        (SENDER, RECEIVER, NETWORK, LANDING),
        lambda state: senders_are_free(state) and receivers_are_free(state),
    ),
    "pages of senders, by their own steps": ((SENDER,), senders_are_free),
    "pages of receivers, by their own steps once nothing is in flight": (
        (RECEIVER, LANDING), receivers_are_free,
    ),
}  # fmt: skip
