"""A separate process, which does what lines of its input say, and answers each with a line.

So a test can stop or kill a process between two lines, and what happens in the middle of a line is
a hook that a line has installed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60

_TESTS = Path(__file__).resolve().parent


def poll(seen, patience_s=PATIENCE_S):
    """Whether something is seen in time."""
    end = time.monotonic() + patience_s
    while not seen():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class LineProcess:
    """The process as a test sees it.

    Parameters
    ----------
    program : Python that it begins with
    printed : a file that gets whatever it prints
    environment : variables added to the environment of the tests

    Attributes
    ----------
    is_as_it_was : False once a test has changed it, so that it is for no other
    """

    def __init__(self, program, printed=os.devnull, **environment):
        paths = [_TESTS.parent, _TESTS, _TESTS / "cache", _TESTS / "remote"]
        joined = os.pathsep.join(map(str, paths))
        self.is_as_it_was, self.printed = True, printed
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(printed)], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": joined, **environment},
        )  # fmt: skip
        self.send(program)

    def send(self, program):
        """Begin to do something; `reply` is its end."""
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()

    def reply(self):
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, "the process does not answer"
        line = self.process.stdout.readline()
        assert line, f"the process has ended: {self.process.wait()}"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["answer"]

    def do(self, program):
        """Do something, and return what it answers."""
        self.send(program)
        return self.reply()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_stopped()

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def wait_stopped(self):
        """Wait until it is stopped, by whom ever."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        assert poll(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def kill(self):
        """Kill it, stopped or not, and wait until it is gone."""
        self.is_as_it_was = False
        self.process.kill()
        self.process.wait()

    def end(self):
        """Kill it, and forget what was not sent or read."""
        self.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    values = []
    names = {"answer": values.append, "poll": poll}
    for line in sys.stdin:
        values.clear()
        try:
            exec(json.loads(line), names)  # the test's own
            reply = {"answer": values[-1] if values else None}
        except BaseException:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
