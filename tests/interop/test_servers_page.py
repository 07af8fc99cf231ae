"""docs/beyond_one_process.md: its program on the server of the page's own command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from redis_server import needs_redis, servers_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "beyond_one_process.md").read_text()
PROGRAM, OUTPUT = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL).groups()
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", "")


@needs_redis
def test_redis(tmp_path, capsys):
    (line,) = (line for line in COMMANDS.splitlines() if line.startswith("redis-server"))
    options = shlex.split(line)[3:]  # the address is the test's
    with servers_in(tmp_path) as start:
        url = start(*options).url.replace("//", "//:secret@")
        code = PROGRAM.replace("file:/tmp/kvcupy-documentation", url)
        code = code.replace(", capacity_bytes=2**26", "")
        assert url in code and "capacity" not in code
        for expected in (OUTPUT, "10 of 10 blocks were there\n"):
            exec(compile(code, "share.py", "exec"), {})
            assert capsys.readouterr().out == expected


@needs_redis
def test_the_rights_of_the_page_suffice(tmp_path, capsys):
    """`redis-cli ACL SETUSER` of the page, as options of the server."""
    (line,) = (line for line in COMMANDS.splitlines() if line.startswith("redis-cli"))
    name, *rights = shlex.split(line)[3:]
    with servers_in(tmp_path) as start:
        url = start("--user", name, *rights).url.replace("//", f"//{name}:secret@")
        code = PROGRAM.replace("file:/tmp/kvcupy-documentation", url)
        exec(compile(code.replace(", capacity_bytes=2**26", ""), "share.py", "exec"), {})
        assert capsys.readouterr().out == OUTPUT
