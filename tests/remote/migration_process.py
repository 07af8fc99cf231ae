"""A process with a sender or a receiver, which does what its standard input says.

python tests/cache/migration_process.py sender '{"pool": {}, "options": {}}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import migration_cases as cases

import kvcupy as kv
from kvcupy.remote.migration import protocol


def answer(**values):
    print(json.dumps(values), flush=True)


def stop_after(count):
    """Stop this process once so many pieces of page data were sent.

    A signal stops the main thread first: the one that sends waits until all continue.
    """
    send = protocol.Channel.send_data
    left, continued = [count], threading.Event()
    signal.signal(signal.SIGCONT, lambda *_: continued.set())

    def sending(channel, *arguments):
        send(channel, *arguments)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            continued.wait()

    protocol.Channel.send_data = sending


def run_sender(pool, options):
    sender = kv.PageSender(pool, **options)
    answer(address=sender.address)
    ticket = b""
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        if command == "offer":
            pages = pool.allocator.alloc(len(request["pages"]))
            assert sorted(pages.tolist()) == sorted(request["pages"])
            ticket = sender.offer(**request)
            answer(ticket=ticket.hex())
        elif command == "layer_done":
            sender.layer_done(ticket, request["layer"])
            answer()
        elif command == "fork":
            child = os.fork()
            if child == 0:
                signal.pause()
            answer(child=child)
        elif command == "stop_after":
            stop_after(request["count"])
            answer()
        elif command == "stats":
            answer(**sender.stats(), free=pool.allocator.num_free)
        elif command == "close":
            sender.close()
            answer(free=pool.allocator.num_free)


def run_receiver(pool, options):
    receiver = kv.PageReceiver(pool, **options)
    answer()
    pull = None
    for line in sys.stdin:
        request = json.loads(line)
        command = request.pop("command")
        if command == "pull":
            pages = pool.allocator.alloc(request["count"])
            pull = receiver.pull(bytes.fromhex(request["ticket"]), pages)
            answer(pages=pages.tolist())
        elif command == "wait_layer":
            pull.wait_layer(request["layer"])
            answer()
        elif command == "wait":
            try:
                pull.synchronize()
                cases.assert_pulled(pool, pages, request["sources"])
                answer(reason="")
            except kv.TransferError as error:
                answer(reason=error.reason)


if __name__ == "__main__":
    role, configuration = sys.argv[1], json.loads(sys.argv[2])
    if versions := configuration.get("versions"):
        protocol.VERSIONS = range(*versions)
    pool = cases.pool_of(**configuration.get("pool", {}))
    options = configuration.get("options", {})
    if "secret" in options:
        options["secret"] = options["secret"].encode()
    if role == "sender":
        cases.fill(pool)
        run_sender(pool, options)
    else:
        run_receiver(pool, options)
