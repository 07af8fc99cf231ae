"""Whether kernels are right on the machine at hand: `kv.verify`, and before a first use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from devices.fake_cuda import captured_by_another
from devices.fake_cuda import kernels as fake_kernels
from helpers import full_only

import kvcupy as kv
from kvcupy import __main__ as command_line
from kvcupy import devices, ops
from kvcupy.config import shared_bytes
from kvcupy.devices import cache
from kvcupy.devices.host import HostDevice
from kvcupy.formats import FOUR_BIT
from kvcupy.ops import call, launch
from kvcupy.testing import cases, run_case, verification
from kvcupy.testing.arrays import Arguments
from kvcupy.testing.cases import case_of

# kv.verify -----------------------------------------------------------------------------------

FAMILIES = ("store", "rope", "attention", "merge", "transfer", "pages", "states", "indexing")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_of_a_family_are_right(device, family):
    report = kv.verify(device, families=[family])
    assert report.ok, str(report)
    assert str(report).startswith(f"verified on {device.name}: ")
    modules = {getattr(kv, outcome.operation).__module__ for outcome in report.outcomes}
    assert modules == {f"kvcupy.ops.{family}"}


def test_a_family_that_is_none():
    with pytest.raises(ValueError, match=r"families: expected some of store, .*, got 'frob'"):
        kv.verify("host", families=["pages", "frob"])
    with pytest.raises(ValueError, match=r"families: expected some of store, .*, got none"):
        kv.verify("host", families=[])
    for wrong in (5, "pages"):
        with pytest.raises(TypeError, match="families: expected names"):
            kv.verify("host", families=wrong)


def test_what_was_recorded_before_is_raised(device):
    """Not taken for a fault of the kernels, nor cleared without a word."""
    kv.copy_pages(device.zeros((2, 4), "fp32"), *(device.asarray(n) for n in np.array([[0], [2]])))
    with pytest.raises(kv.IndexFault, match="dst_pages"):
        kv.verify(device, families=["pages"])


@pytest.mark.parametrize("broken", [False, True])
def test_the_first_line_says_whether_all_are_right(broken, kernel_sources, tmp_path, capsys,
                                                   monkeypatch):  # fmt: skip
    if broken:
        kernel_sources.replace("pages.cu", "* p.row_bytes_2", "* 0")
    kernel_sources.device("-O0")
    monkeypatch.setattr(verification, "_FAMILIES", {"copy_pages": "pages"})
    monkeypatch.setattr(verification, "cases", lambda: cases(["copy_pages"]))
    monkeypatch.setattr(verification, "own_cases", lambda: [])
    monkeypatch.setattr(verification, "_further_cases", lambda arch: [])
    file = tmp_path / "new" / "verify.json"

    status = command_line.main(["verify", "--device", "host", "--json", str(file)])

    first, *others = capsys.readouterr().out.splitlines()
    report = json.loads(file.read_text())
    assert (status, report["ok"]) == (int(broken), not broken)
    assert first.startswith("NOT verified on host: " if broken else "verified on host: ")
    assert bool(others) == broken
    failed = {o["case"] for o in report["outcomes"] if o["verdict"] != "conforms"}
    assert failed == ({"views"} if broken else set())


def test_a_device_that_is_none(capsys):
    assert command_line.main(["verify", "--device", "frob"]) == 2
    assert "device" in capsys.readouterr().err


# Before a first use --------------------------------------------------------------------------

SPECIALISATIONS = [
    specialisation for specialisation in ops.specialisations()
    if ops.is_reachable(specialisation, "sm_86") and case_of(specialisation)
]  # fmt: skip
FAST = {specialisation.kernel.name: specialisation for specialisation in reversed(SPECIALISATIONS)}
"""One for each kernel that has a plainer one."""
PAGES = FAST["copy_pages"]


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """Check kernels of the host device, too, and keep records for the length of a test.

    Returns
    -------
    list of the kernels that were checked
    """
    checked, check, path = [], verification._difference, cache.path

    def note(device, specialisation, case):
        checked.append(str(specialisation))
        return check(device, specialisation, case)

    def own_path(key, suffix=""):
        return tmp_path / key if key.startswith("verified-") else path(key, suffix)

    monkeypatch.setattr(verification, "_difference", note)
    monkeypatch.setattr(cache, "path", own_path)
    monkeypatch.setattr(launch, "VERIFIED_KINDS", {"host", "cuda"})
    monkeypatch.setattr(call, "_plans", {})
    kv.config.verify = "first_use"
    return checked


def broken(kernel_sources, specialisation):
    """Return a device on which some blocks of a kernel return at once; not of its plainest form."""
    kernel = specialisation.kernel
    head = f"{kernel.name}(const __grid_constant__ {kernel.struct} p) {{"
    if kernel.name.startswith("attention"):
        condition = "blockIdx.y == 0"
    else:
        size = "kWordBytes" if specialisation.arguments[0].isdigit() else "kCount"
        condition = f"{size} != 1 && blockIdx.x == 0"
    kernel_sources.replace(kernel.source, head, f"{head} if ({condition}) return;")
    return kernel_sources.device("-O0")


def run(device, specialisation):
    """Run the case of a kernel as a user's call, with other arguments than the check has."""
    case = case_of(specialisation)
    function = verification.function_of(case)
    return run_case(case, function, device=device, seed=1, records_faults=True)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", FAST)
def test_a_wrong_kernel_is_replaced(name, first_use, kernel_sources, caplog):
    specialisation = FAST[name]
    device = broken(kernel_sources, specialisation)

    for _ in range(2):
        assert str(run(device, specialisation)).endswith(": conforms")
    assert first_use.count(str(specialisation)) == 1
    (warning,) = warnings(caplog)
    assert f"{specialisation} is not used on host" in warning
    assert "elements differ" in warning
    assert "scripts/gpu_report.sh" in warning

    kv.config.verify = "never"
    call.forget()
    assert run(device, specialisation).verdict == "differs"


def test_a_right_kernel_is_checked_once(first_use, kernel_sources, caplog):
    for device in (kernel_sources.device("-O0"), kernel_sources.device("-O0")):
        assert run(device, PAGES).verdict == run(device, PAGES).verdict == "conforms"
        assert call._plans, "a verified plan lasts"
    assert (first_use, warnings(caplog)) == ([str(PAGES)], [])


def test_what_a_record_holds_for(first_use, kernel_sources, monkeypatch, caplog, tmp_path):
    device = broken(kernel_sources, PAGES)
    run(device, PAGES)

    def again(expected):
        """Another process: it warns, too, and checks if it must."""
        first_use.clear()
        caplog.clear()
        other = kernel_sources.device("-O0")
        assert run(other, PAGES).verdict == "conforms"
        assert (first_use, len(warnings(caplog))) == ([str(PAGES)] * expected, 1)

    again(0)
    (record,) = tmp_path.glob("verified-*")
    record.write_bytes(b"right" + record.read_bytes())  # damaged
    again(1)
    monkeypatch.setattr(HostDevice, "fingerprint", lambda self, s: ("other driver", str(s)))
    again(1)
    again(0)


def test_a_record_is_of_one_driver_and_program(kernel_sources, monkeypatch):
    device = kernel_sources.device("-O0")
    before = device.fingerprint(PAGES)
    kernel_sources.replace("pages.cu", "constexpr int kUnroll = 4;", "constexpr int kUnroll = 2;")
    assert device.fingerprint(PAGES) != before


MEETING = """
import sys, time
from pathlib import Path
import kvcupy as kv
from kvcupy.ops.pages import COPY
from kvcupy.testing import verification

device, checks, check = kv.device("host"), [], verification._difference
device.warp_lanes = 32
device.load(COPY.specialise(16))
verification._difference = lambda *case: checks.append(time.sleep(0.3)) or check(*case)
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(verification.is_verified(device, COPY.specialise(16)), len(checks))
"""


def test_processes_that_meet_check_once(tmp_path):
    environment = {**os.environ, "KVCUPY_CACHE_DIR": str(tmp_path)}
    ready = [tmp_path / "one", tmp_path / "two"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEETING, str(mine), str(others)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for mine, others in (ready, ready[::-1])
    ]  # fmt: skip
    said = [process.communicate(timeout=600)[0].strip() for process in processes]
    assert sorted(said) == ["True 0", "True 1"]


def test_in_a_capture_the_plainer_kernel_serves_until_a_call_outside(
    first_use, monkeypatch, caplog
):
    device = HostDevice()
    device.warp_lanes = 32
    monkeypatch.setitem(devices._devices, "host", device)
    cache_, pages = device.zeros((4, 64), "fp32"), [np.array([0]), np.array([1])]
    launched, load_ = [], device.load
    monkeypatch.setattr(device, "load", lambda s: (launched.append(s), load_(s))[1])
    stream = device.stream()
    with stream.capture():
        kv.copy_pages(cache_, *pages, stream=stream)
        kv.copy_pages(cache_, *pages, stream=stream)
    assert (str(launched[-1]), first_use) == ("pages.cu:copy_pages<1>", [])
    (warning,) = warnings(caplog)
    assert f"{PAGES} has not been checked" in warning
    kv.copy_pages(cache_, *pages)
    assert (str(launched[-1]), first_use) == (str(PAGES), [str(PAGES)])
    launched.clear()
    with stream.capture():
        kv.copy_pages(cache_, *pages, stream=stream)
    assert launched == [], "the plan that was made outside serves"


def test_a_check_that_fails_is_no_record(first_use, kernel_sources, monkeypatch, caplog, tmp_path):
    """The call is served, by the plainer kernel, and another process tries again."""
    device, used = kernel_sources.device("-O0"), "pages.cu:copy_pages<1>"

    def fail(*_):
        raise kv.DeviceError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(verification, "_difference", fail)
        assert run(device, PAGES).verdict == "conforms"
    (warning,) = warnings(caplog)
    assert "its check failed: DeviceError: out of memory" in warning
    assert [
        str(launch.specialisation) for plan in call._plans.values() for launch in plan.launches
    ] == [used]
    assert list(tmp_path.glob("verified-*")) == []
    assert verification.is_verified(kernel_sources.device("-O0"), PAGES)


def test_never(first_use, kernel_sources):
    kv.config.verify = "never"
    assert run(broken(kernel_sources, PAGES), PAGES).verdict == "differs"
    assert first_use == []


def test_what_the_setting_takes():
    for value in ("always", None, True):
        with pytest.raises(ValueError, match=r"verify: expected .*first_use.*never"):
            kv.config.verify = value


@pytest.mark.parametrize("arch", ["sm_90", full_only("sm_75"), full_only("sm_80")])
def test_every_kernel_with_a_plainer_one_has_a_case_that_takes_it(arch, monkeypatch):
    """So that none is taken to be right, or wrong, unseen. What a call would launch is enough."""
    device = HostDevice()
    device.warp_lanes, device.arch = 32, arch
    device.shared_bytes = shared_bytes(arch)
    monkeypatch.setitem(devices._devices, "host", device)
    monkeypatch.setattr(device, "load", lambda s: SimpleNamespace(specialisation=s))
    monkeypatch.setattr(device, "launch", lambda *launch: None)
    call.forget()  # a plan that an earlier call of the same shapes made would be taken unnoted
    missed = []
    for specialisation in ops.specialisations():
        case = case_of(specialisation)
        if case is None or not ops.is_reachable(specialisation, arch):
            continue
        made = case.build(Arguments(device, 0))
        with launch.unverified() as taken:
            verification.function_of(case)(
                **{n: getattr(a, "array", a) for n, a in made.arguments.items()}
            )
        if specialisation not in taken:
            missed.append(str(specialisation))
    assert missed == []


def test_kernels_without_a_case_have_no_plainer_one():
    """They are for arrays of no alignment, or the only ones of their kind."""
    only = ("attention_decode", "attention_starts", "attention_schedule")
    only += ("slot_mapping", "note_fault")
    packed = {form.ctype for form in FOUR_BIT.values()}
    for specialisation in ops.specialisations():
        arguments = specialisation.arguments
        if specialisation.kernel.name == "transfer_copy" and arguments[2:]:
            continue  # by tables of addresses, which no operation takes
        if case_of(specialisation) is None and specialisation.kernel.name not in only:
            widths = (
                arguments[1:2] if specialisation.kernel.name.startswith("shift") else arguments[::2]
            )
            assert "1" in widths[:2] or packed >= {*arguments[:2]}


# On the stand-in for CUDA --------------------------------------------------------------------


@pytest.fixture
def cuda(first_use, kernel_sources, monkeypatch):
    """A stand-in that runs the host's builds of `kernel_sources`."""
    monkeypatch.setattr(fake_kernels, "_BUILDS", {})
    monkeypatch.setattr(kv.config, "_strict", False)
    yield fake_kernels.open_device(monkeypatch)
    call.forget()


BROKEN_ON_CUDA = ("store_copy", "attention_prefill")


@pytest.mark.parametrize("name", BROKEN_ON_CUDA)
def test_a_wrong_kernel_is_replaced_on_cuda(name, cuda, first_use, kernel_sources, caplog):
    specialisation = FAST[name]
    broken(kernel_sources, specialisation)
    outcome = run(cuda, specialisation)
    assert str(outcome).endswith(": conforms")
    assert first_use.count(str(specialisation)) == 1
    (warning,) = warnings(caplog)
    assert f"{specialisation} is not used on cuda:0" in warning


def test_captures_on_cuda_are_left_alone(cuda, first_use):
    """Of kvcupy, and of another library: its stream is current."""
    device, api = cuda, cuda.context.api
    with device.stream().capture():
        assert verification.is_verified(device, PAGES) is None
    with captured_by_another(api) as stream, stream:
        assert verification.is_verified(device, PAGES) is None
    assert first_use == []
    with captured_by_another(api):  # its stream is not current: the check disturbs it not
        assert verification.is_verified(device, PAGES)
    assert first_use == [str(PAGES)]
