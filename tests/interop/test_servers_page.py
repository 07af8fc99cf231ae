"""docs/shared_store_servers.md: its programs, with servers of the test's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from mooncake_servers import needs_mooncake
from mooncake_servers import servers_in as mooncake_in

ROOT = Path(__file__).resolve().parents[2]

from redis_server import needs_redis  # noqa: E402
from redis_server import servers_in as redis_in  # noqa: E402

PAGE = (ROOT / "docs" / "shared_store_servers.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")


def words_of(start):
    """Return a command of the page as a list."""
    (line,) = (line for line in COMMANDS.splitlines() if line.startswith(start))
    return shlex.split(line)


def run(program, replacements):
    code, output = program
    for old, new in replacements.items():
        code = code.replace(old, new)
    variables = {}
    exec(compile(code, "example.py", "exec"), variables)
    return variables, output


@needs_redis
def test_redis(tmp_path, capsys):
    options = words_of("redis-server")[3:]  # the address is the test's
    with redis_in(tmp_path) as start:
        server = start(*options)
        url = {"redis://:secret@localhost": server.url.replace("//", "//:secret@")}
        _, output = run(PROGRAMS[0], url)
        assert capsys.readouterr().out == output
        run(PROGRAMS[0], url)
        assert capsys.readouterr().out == "10 of 10 blocks were there\n"


@pytest.mark.full
@needs_mooncake
def test_mooncake(tmp_path, capsys):
    own = ("--rpc_address", "--rpc_port", "--metrics_host")  # the addresses are the test's
    options = [word for word in words_of("mooncake_master")[1:] if not word.startswith(own)]
    with mooncake_in(tmp_path) as start:
        url = {"mooncake://127.0.0.1:50051": start(*options).url}
        variables, output = run(PROGRAMS[1], url)
        assert capsys.readouterr().out == output
        _, output = run(PROGRAMS[2], url)
        assert capsys.readouterr().out == output
        variables["node"].close()


def test_all_programs_are_run():
    assert len(PROGRAMS) == PAGE.count("```python") == 3
