"""The documentation: its examples run and print what it says, its links lead somewhere, and its
pages fit on a phone."""

from __future__ import annotations

import json
import queue
import re
import runpy
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
# In these each continues the one before: test_readme.py and test_metrics.py run them.
ELSEWHERE = (
    "finding_a_race.md", "running.md", "testing_your_own_kernel.md",
)  # fmt: skip
EXAMPLES = [
    pytest.param(*example.groups(), id=f"{name}-{number}")
    for name, text in PAGES.items() if name not in ELSEWHERE
    for number, example in enumerate(EXAMPLE.finditer(text))
]  # fmt: skip
NEEDED = (
    ("torch", "torch|interop import (?:flashinfer|vllm|sglang)"),
    ("transformers", "transformers"), ("zmq", "zmq"), ("msgspec", "msgspec"),
    ("nixl_cu12", "PageSender"),
)  # fmt: skip
PHONE_WIDTH = 390
CHROMIUM = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)


@pytest.fixture
def stores():
    """Remove the store that an example leaves, as it says, before and after it."""
    left = Path("/tmp/kvcupy-documentation")
    shutil.rmtree(left, ignore_errors=True)
    yield
    shutil.rmtree(left, ignore_errors=True)


@pytest.mark.usefixtures("lenient_host", "stores")
@pytest.mark.parametrize("code, output", EXAMPLES)
def test_example(code, output, capsys):
    for library, words in NEEDED:
        if re.search(words, code):
            pytest.importorskip(library)
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


@pytest.mark.parametrize("section, expected", [
    ("Parameters\n---\nx, y : 1,\n  2\nz\n", "Parameters\n-\nx\n    1,\n  2\ny\n    as `x`\nz\n"),
    ("Notes\n---\nStream : none\n", "Notes\n-\nStream : none\n"),
    ("Returns\n---\nint : a count\n", "Returns\n-\nint\n    a count\n"),
    ("Returns\n---\na list\n    of ints\n", "Returns\n-\na list\n    of ints\n"),
    ("Returns\n---\nA list of\npages\n", "**Returns:** A list of\npages\n\n"),
    ("Raises\n---\nE : no\nIt is as before.\n", "It is as before.\n\nRaises\n-\nE\n    no\n"),
])  # fmt: skip
def test_docstrings_are_read(section, expected):
    pytest.importorskip("griffe")
    below_names = runpy.run_path(ROOT / "scripts/documentation/docstrings.py")["below_names"]
    assert (
        re.sub(r"^-+$", "-", below_names(f"Add.\n\n{section}"), flags=re.M) == f"Add.\n\n{expected}"
    )


# The site as it is built ---


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    # With --quiet it would not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Server(ThreadingHTTPServer):
    """Serves a folder, and takes what a page of it sends."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.received = queue.Queue()


class Handler(SimpleHTTPRequestHandler):
    def do_POST(self):
        self.server.received.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(site):
    with Server(site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


# Opens each page in a frame as wide as a phone, and sends what it sees.
LOOK = """<!doctype html><body><script>
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
  await fetch("/", {method: "POST", body: JSON.stringify(seen)});
})();
</script>"""


def look_at(site, server, profile, paths):
    """Return what Chromium sees of pages: a dictionary each."""
    page = LOOK.replace("WIDTH", str(PHONE_WIDTH)).replace("PATHS", json.dumps(paths))
    (site / "look.html").write_text(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    chromium = subprocess.Popen(
        [CHROMIUM, *options, f"{server.address}/look.html"], stderr=subprocess.DEVNULL
    )
    try:
        return server.received.get(timeout=120)
    finally:
        chromium.terminate()
        chromium.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_pages_in_a_browser(site, server, tmp_path):
    paths = sorted(f"/{path.relative_to(site)}" for path in site.rglob("*.html"))
    assert len(paths) > len(PAGES)  # and 404.html
    texts = {path: (site / path[1:]).read_text() for path in paths}
    seen = look_at(site, server, tmp_path, paths)
    assert [page["path"] for page in seen] == paths
    assert [page["path"] for page in seen if not (page["title"] and page["styled"])] == []
    assert {p["path"]: p["width"] for p in seen if p["width"] > PHONE_WIDTH} == {}
    assert [url for page in seen for url in page["broken"]] == []
    links = {url for page in seen for url in page["links"]}
    assert {
        url for url in links if not url.startswith(server.address) and "mkdocs" not in url
    } == set()
    dead = []
    for url in (urlsplit(url) for url in links if url.startswith(server.address)):
        path = url.path + "index.html" * url.path.endswith("/")
        text = texts.get(path)
        if not (site / unquote(path)[1:]).is_file() or (
            url.fragment and text is not None and f'id="{unquote(url.fragment)}"' not in text
        ):
            dead.append(url.geturl())
    assert dead == []


# Figures ---


def table_rows(text, header):
    """The cells of the tables of a page that begin with a header, without code marks."""
    tables = re.findall(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert tables, header
    rows = "".join(tables).replace("`", "").splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def scheme_of(label):
    """The study's name of what a row of the page is about."""
    words = {
        ", scale per token and head": "", ", rotated": ", hadamard",
        ", four over six": ", 4 over 6", ", values alone": " values", ", keys alone": " keys",
        " and the first ": ", sinks ", ", the last ": ", recent ",
    }  # fmt: skip
    for word, name in words.items():
        label = label.replace(word, name)
    return label


def test_figures_of_the_quantisation_study():
    """Each row of the page has the figures of the JSON, and each divergence in its text too."""
    text = PAGES["quantised_caches.md"].partition("## What it costs in quality")[2]
    study = json.loads((ROOT / "scripts/results/quantisation_study.json").read_text())
    model = {row["scheme"]: row for row in study["model"]["results"]}
    for label, *cells in table_rows(text, "past, and tokens in 16 bits"):
        row = model[scheme_of(label)]
        assert cells == [
            f"{row['bits']:g}", f"{row['loss_change']:+.3f} ± {row['standard_error']:.3f}",
            f"{row['divergence']:.4f}", f"{100 * row['same_token']:.1f} %",
        ], label  # fmt: skip
    drawn = {(row["rows"], row["scheme"]): row["output_error"] for row in study["rows"]}
    for label, *cells in table_rows(text, "past | plain"):
        errors = [drawn[kind, scheme_of(label)] for kind in ("plain", "llama", "qwen")]
        assert cells == [f"{100 * error:.1f} %" for error in errors], label
    divergences = {f"{row['divergence']:.4f}" for row in model.values()}
    assert set(re.findall(r"0\.\d{4}", text)) <= divergences


def test_figures_of_the_demo_of_vllm():
    report = json.loads((ROOT / "scripts/results/vllm_demo_host.json").read_text())
    rows = table_rows(PAGES["engines.md"], "time to first token")
    for (_, *cells), row in zip(rows, report["rows"], strict=True):
        share = row["cached_tokens"] / row["prompt_tokens"]
        assert cells == [
            f"{row['first_question_ms']:.0f} ms", f"{row['second_question_ms']:.0f} ms",
            f"{100 * share:.0f} %",
        ], row["case"]  # fmt: skip


def test_figures_of_mixed_layers():
    page, results = PAGES["mixed_layers.md"], ROOT / "scripts/results"
    memory = json.loads((results / "bench_memory_host.json").read_text())
    rows = table_rows(page, "layers | needed")
    for (label, *cells), row in zip(rows, memory["rows"], strict=True):
        assert label.startswith(row["model"])
        sizes = [row[f"{name}_bytes"] / 1e6 for name in ("needed", "groups", "without_groups")]
        assert cells == [f"{size:,.1f} MB" for size in sizes]
        assert row["times_needed"] <= 1.1
