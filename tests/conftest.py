"""Choose the device of a test run: ``pytest --device host`` (default), ``cuda`` or ``cuda:1``.

The host device is strict (`kv.config.strict`) unless ``--no-strict`` is given: what a GPU would
punish fails a test. Orders of threads and blocks are drawn from ``--strict-seed`` and the name of
the test; the header shows the seed of a run.

``--full`` is exhaustive: more cases of a test that is marked ``covering``, the cases of
`helpers.full_only`, and as many examples as `helpers.examples` is asked for.

``--random-order`` shuffles modules, and the tests in each, by the same seed.
``--remaining`` runs only the tests that did not pass in the previous run, such as those that were
skipped because a library was missing.
"""

from __future__ import annotations

import gc
import os
import random
import re
import secrets
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

# Matrices are small here, and so are the gains of several threads for one: in as many processes as
# there are CPUs they wait for one another most of the time. Read when NumPy and torch are imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A stream that a test holds up must not hold up another one, by sharing a hardware queue with it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import helpers
import pytest
from hypothesis import HealthCheck, settings

# An example may take as long as it does on a busy machine.
settings.register_profile(
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

NUM_TESTS = pytest.StashKey[int]()
"""How many tests this process has run."""

PASSED = "kvcupy/passed"
"""The key in pytest's cache of the tests that passed in the previous run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="host", help="the kvcupy device that the tests run on")
    parser.addoption("--full", action="store_true", help="run more cases of each test")
    parser.addoption(
        "--arch", type=int, metavar="NN",
        help="let the host device run the branches of sm_NN: 75, 80, 89, 90, 100",
    )  # fmt: skip
    parser.addoption("--no-strict", action="store_true", help="let the host device be lenient")
    parser.addoption(
        "--check-order", action="store_true", help="let kv.order_checker look at every test"
    )
    parser.addoption("--strict-seed", type=int, help="repeat the random orders of a run")
    parser.addoption(
        "--random-order", action="store_true", help="shuffle modules, and the tests in each"
    )
    parser.addoption(
        "--remaining", action="store_true", help="run what did not pass in the previous run"
    )
    parser.addoption(
        "--sanitize", action="store_true",
        help="run kernels under the address and undefined-behaviour sanitizers (scripts/test.sh)",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    of_controller = getattr(config, "workerinput", None)  # None unless this is a worker of xdist
    if of_controller is None:
        config.pluginmanager.register(PassedTests(config))
    if config.option.strict_seed is None:
        seed = of_controller["strict_seed"] if of_controller else secrets.randbits(32)
        config.option.strict_seed = seed
    helpers.full = config.option.full
    if config.option.sanitize:
        sanitize(config)
    if config.option.arch:
        import redzones

        redzones.compile_with(f"-DKVCUPY_ARCH={config.option.arch}0")
    # A shell that runs the tests in the background lets them ignore Ctrl-C, and programs started by
    # tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "covering(count): run few of its cases, in which each combination of values of `count`"
        " parameters (1 unless told) still occurs; with --full, of one parameter more",
    )
    config.addinivalue_line(
        "markers", "again: a module of other modules' tests, all of which count as covering(1)"
    )
    config.addinivalue_line("markers", "full: runs with --full only")
    config.addinivalue_line("markers", "gpu: needs a real GPU; skipped where there is none")
    config.addinivalue_line("markers", "slow: takes long, or much memory")
    config.addinivalue_line(
        "markers",
        "races(part): leaves a wait out on purpose, which --check-order must report; with `part`,"
        " only the cases that have it in their names",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Give a worker of xdist the seed that the header shows."""
    node.workerinput["strict_seed"] = node.config.option.strict_seed


class PassedTests:
    """Record the tests that pass in pytest's cache, for `--remaining`."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if cache := getattr(self.config, "cache", None):
            cache.set(PASSED, self.names)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """If there is a GPU, let one process run all files with tests for GPUs."""
    if config.getvalue("dist") != "worksteal" or why_no_gpu():
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneProcessForGpu(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "gpu" if is_for_gpu(config.rootpath / nodeid.partition("::")[0]) else nodeid

    return OneProcessForGpu(config, log)


@lru_cache
def is_for_gpu(file: Path) -> bool:
    """Return whether a file has tests for GPUs."""
    return "mark.gpu" in file.read_text(encoding="utf-8")


def sanitize(config: pytest.Config) -> None:
    """Run this process's kernels under sanitizers; `redzones` says how."""
    import redzones

    if not redzones.active():
        raise pytest.UsageError("--sanitize: its runtime is not loaded; use scripts/test.sh")
    if config.option.device != "host":
        raise pytest.UsageError(f"--sanitize: expected --device host, got {config.option.device}")
    config.option.no_strict = True  # whose instrumentation excludes sanitizers
    redzones.use()
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        os.environ.pop("LD_PRELOAD", None)  # compilers and programs of tests need none of it


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.sanitize:
        device = "host device under address and undefined-behaviour sanitizers"
    elif config.option.no_strict:
        device = "lenient host device"
    else:
        device = "strict host device"
    return f"kvcupy: {device}, --strict-seed {config.option.strict_seed}"


@pytest.fixture(autouse=True)
def strict_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the host device as strict as a GPU, its orders drawn from the test's own seed.

    Index faults are left to `kv.check_faults`, as on a GPU; a test that has some must ask for them.
    """
    import kvcupy as kv

    option, host = request.config.option, kv.device("host")
    monkeypatch.setattr(kv.config, "_strict", not option.no_strict)
    monkeypatch.setattr(kv.config, "_strict_index_faults", "record")
    monkeypatch.setattr(kv.config, "_verify", "never")  # test_verify.py is about the other
    kv.config.strict_seed = zlib.crc32(request.node.nodeid.encode()) ^ option.strict_seed
    # Tests of the checker make their own, and an interrupt can leave its locks held.
    path = request.node.path
    makes_own = "order" in (path.parent.name, path.stem.removeprefix("test_cuda_"))
    watched = option.check_order and not makes_own and path.stem != "test_interrupts"
    with kv.order_checker("record") if watched else nullcontext() as checker:
        yield
    host.synchronize()
    host.context.raise_fault()
    if checker is not None:
        marker = request.node.get_closest_marker("races")
        races = marker is not None and all(part in request.node.name for part in marker.args)
        assert bool(checker.reports) == races, "\n".join(map(str, checker.reports))


@pytest.fixture
def lenient_host(strict_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test run what users run: builds with this processor's own vector code."""
    import kvcupy as kv

    monkeypatch.setattr(kv.config, "_strict", False)


@pytest.fixture
def quick_host(strict_host: None, request: pytest.FixtureRequest) -> None:
    """Let a long test of whole programs be strict in its first case only.

    Its kernels are looked at by the tests of the operations, all of which are strict.
    """
    call = getattr(request.node, "callspec", None)
    if call is not None and any(call.indices.values()):
        request.getfixturevalue("lenient_host")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(exhaustive(items, config.option.full))
    if config.option.sanitize:
        left_out |= {item for item in items if not is_for_sanitizers(item)}
    if config.option.remaining:
        passed = set(config.cache.get(PASSED, []))
        left_out |= {item for item in items if item.nodeid in passed}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    if config.option.random_order:
        rng = random.Random(config.option.strict_seed)
        rank = {item.path: rng.random() for item in items}
        items.sort(key=lambda item: (rank[item.path], rng.random()))
    if find_spec("nixl_cu12") is None:
        for item in items:
            if item.nodeid.endswith("::kvcupy.remote.migration.sender.PageSender"):  # its example
                item.add_marker(pytest.mark.skip(reason="pip install --no-deps nixl-cu12"))
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not for_gpu:
        return
    if reason := why_no_gpu():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {reason}"))


@lru_cache
def why_no_gpu() -> str:
    """Return why tests for GPUs cannot run, "" if they can.

    No context is created: every worker asks, and a GPU in exclusive mode accepts one process.
    """
    from kvcupy.cuda_api import CudaApi

    try:
        api = CudaApi()
        return api.complaint() or ("" if api.runtime.getDeviceCount() else "the driver lists none")
    except Exception as error:  # no CuPy, or a driver that does not work
        return str(error).partition("\n")[0]


def forget_what_is_alive() -> None:
    """Let the garbage collector pass over all that is alive now.

    Tests that look for what is kept collect often, and walked through every test and every library
    each time.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    forget_what_is_alive()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pass over the libraries and results of the tests so far, too."""
    item.session.stash[NUM_TESTS] = count = item.session.stash.get(NUM_TESTS, 0) + 1
    if count % 100 == 0:
        forget_what_is_alive()


def is_for_sanitizers(item: pytest.Item) -> bool:
    """Return whether a test says more under sanitizers; kernels broken on purpose only crash."""
    import redzones

    broken = "kernel_sources" in getattr(item, "fixturenames", ())
    return not broken and item.path.name not in redzones.LEFT_OUT


def identity(value: object) -> object:
    """Return what two values have in common if and only if they are the same."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def parameters(item: pytest.Item, values: dict[str, object]) -> list[object]:
    """Return the parameters of a case, of which a row of a table is one."""
    rows = [marker.args[0] for marker in item.iter_markers("parametrize")]
    rows = [re.findall(r"\w+", row) if isinstance(row, str) else list(row) for row in rows]
    rows += [[name] for name in values if not any(name in row for row in rows)]
    return [tuple((name, identity(values[name])) for name in row) for row in rows]


def exhaustive(items: list[pytest.Item], full: bool) -> list[pytest.Item]:
    """Return the cases that do not run, or only with ``--full``.

    A case of a test marked ``covering`` that was asked for by its own name is not among them, for
    it is then the only one.
    """
    cases: dict[str, list[tuple[pytest.Item, set[object]]]] = {}
    for item in items:
        call = getattr(item, "callspec", None)
        again, marker = (item.get_closest_marker(name) for name in ("again", "covering"))
        if call is None or not (again or marker):
            continue
        count = 1 if again or not marker.args else marker.args[0]
        values = parameters(item, call.params)
        combined = set(combinations(values, min(count + full, len(values))))
        cases.setdefault(item.nodeid.partition("[")[0], []).append((item, combined))
    left_out = [item for item in items if item.get_closest_marker("full") and not full]
    for remaining in cases.values():
        uncovered = set().union(*(combined for _, combined in remaining))
        while uncovered:
            case = max(remaining, key=lambda case: len(case[1] & uncovered))  # the first of equals
            uncovered -= case[1]
            remaining.remove(case)
        left_out += [item for item, _ in remaining]
    return left_out


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest):
    """The device named by ``--device``.

    Where a kernel does not compile, its test fails: the reference would pass in its place.
    The host device lays kernels out as a GPU does, so that several threads share a row.
    """
    import kvcupy as kv

    kv.config.fallback = "error"
    chosen = kv.device(request.config.getoption("--device"))
    if chosen.kind == "host":
        chosen.warp_lanes = 32
    return chosen


@pytest.fixture(params=["lenient", "strict"])
def users_device(device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The device as users have it: on the host each row has one thread, strict or not."""
    from kvcupy.ops import call

    if device.kind == "host":
        monkeypatch.setattr(device, "warp_lanes", 1)
        monkeypatch.setattr(call, "_plans", {})
        if request.param == "lenient":
            request.getfixturevalue("lenient_host")
    elif request.param == "strict":
        pytest.skip("a GPU is always strict")
    return device


@pytest.fixture(params=[False, True], ids=["without torch", "with torch"])
def with_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch can be imported: a test runs both ways, or once where it is not installed."""
    if request.param:
        pytest.importorskip("torch")
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    return request.param


@pytest.fixture
def plain_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep Inductor from trying vector instructions out, which takes it longer than a graph.

    Graphs that an earlier run compiled are not used: their calls have the schemas of that time.
    """
    from torch._inductor import cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


@pytest.fixture
def device_name(request: pytest.FixtureRequest) -> str:
    """What ``--device`` says, for scripts that are given it."""
    return request.config.getoption("--device")


@pytest.fixture
def only_numpy(monkeypatch):
    """As in a process that has not seen arrays of libraries with streams, as other tests leave."""
    from kvcupy.ops import call, custom

    for module in (call, custom):
        monkeypatch.setattr(module, "STREAMED_TYPES", set())


@pytest.fixture
def scripts_on_path(monkeypatch):
    """Let the scripts be imported, as they import one another."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "scripts"))


@pytest.fixture
def kernel_sources(tmp_path, monkeypatch):
    """A copy of ``kernels_src`` that a test may change, and that every host device of the test
    compiles from (`helpers.KernelSources`)."""
    from helpers import KernelSources

    from kvcupy import sources

    folder = tmp_path / "kernels_src"
    shutil.copytree(Path(__file__).resolve().parents[1] / "kernels_src", folder)
    monkeypatch.setattr(sources, "kernels_dir", lambda: folder)
    return KernelSources(folder, monkeypatch)
