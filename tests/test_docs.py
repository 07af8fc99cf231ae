"""The documentation: its examples run and print what it says, its links lead somewhere, and its
pages fit on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import kvcupy as kv

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
# Python, and the output that may follow.
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
# In finding_a_race.md each goes on from the one before: test_readme.py runs them.
EXAMPLES = [
    pytest.param(*example.groups(), id=f"{name}-{number}")
    for name, text in PAGES.items() if name != "finding_a_race.md"
    for number, example in enumerate(EXAMPLE.finditer(text))
]  # fmt: skip
PHONE_WIDTH = 390
CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


@pytest.mark.usefixtures("lenient_host")
@pytest.mark.parametrize("code, output", EXAMPLES)
def test_example(code, output, capsys):
    if "torch" in code:
        pytest.importorskip("torch")
    if "transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, "example.py", "exec"), {})
    printed = capsys.readouterr().out
    assert printed == (output or "")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    prose = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", prose)
    links += re.findall(r'(?:src|href)="([^"#:]+)', prose)
    assert [link for link in links if not (DOCS / name).parent.joinpath(link).exists()] == []


def test_everything_public_is_in_the_reference():
    named = re.findall(r"^::: kvcupy\.(\w+)$", "\n".join(PAGES.values()), re.MULTILINE)
    assert sorted([*named, "config"]) == sorted(kv.__all__)
    assert "::: kvcupy.config.Config" in PAGES["reference/errors_and_settings.md"]


# The site as it is built ---


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def address(site):
    """Where the site is served."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


# Opens each page in a frame as wide as a phone, and leaves what it sees as its own text.
LOOK = """<!doctype html><pre id="seen"></pre><script>
const look = (path) => new Promise((resolve) => {
  const frame = document.createElement("iframe");
  frame.style = "width: WIDTHpx; height: 800px; border: 0";
  frame.onload = () => {
    const page = frame.contentDocument;
    const urls = (all) => all.map((each) => each.src || each.href);
    resolve({
      path, title: page.title, width: page.documentElement.scrollWidth,
      broken: urls([...page.images].filter((each) => !each.complete || !each.naturalWidth)),
      links: urls([...page.querySelectorAll("a[href], link[href], script[src], img[src]")]),
      styled: [...page.styleSheets].every((sheet) => sheet.cssRules.length > 0),
    });
    frame.remove();
  };
  frame.src = path;
  document.body.append(frame);
});
(async () => {
  const seen = [];
  for (const path of PATHS) seen.push(await look(path));
  document.getElementById("seen").textContent = btoa(JSON.stringify(seen));
})();
</script>"""


def look_at(site, address, profile, paths):
    """Return what Chromium sees of pages: a dictionary each."""
    page = LOOK.replace("WIDTH", str(PHONE_WIDTH)).replace("PATHS", json.dumps(paths))
    (site / "look.html").write_text(page)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--virtual-time-budget=600000", "--dump-dom", f"{address}/look.html",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (seen,) = re.findall(r'<pre id="seen">([\w+/=]+)</pre>', done.stdout) or [None]
    assert seen, done.stderr
    import base64

    return json.loads(base64.b64decode(seen))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_pages_in_a_browser(site, address, tmp_path):
    paths = sorted(f"/{path.relative_to(site)}" for path in site.rglob("*.html"))
    assert len(paths) > len(PAGES)  # and 404.html
    texts = {path: (site / path[1:]).read_text() for path in paths}
    seen = look_at(site, address, tmp_path, paths)
    assert [page["path"] for page in seen] == paths
    assert [page["path"] for page in seen if not (page["title"] and page["styled"])] == []
    assert {p["path"]: p["width"] for p in seen if p["width"] > PHONE_WIDTH} == {}
    assert [url for page in seen for url in page["broken"]] == []
    links = {url for page in seen for url in page["links"]}
    assert {url for url in links if not url.startswith(address) and "mkdocs" not in url} == set()
    dead = []
    for url in (urlsplit(url) for url in links if url.startswith(address)):
        path = url.path + "index.html" * url.path.endswith("/")
        text = texts.get(path)
        if not (site / unquote(path)[1:]).is_file() or (
            url.fragment and text is not None and f'id="{unquote(url.fragment)}"' not in text
        ):
            dead.append(url.geturl())
    assert dead == []
