"""Settings of the environment, and logs at a bounded rate."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from kvcupy.config import BoundedLog, Config


@pytest.mark.parametrize("setting", ["strict", "nvtx"])
@pytest.mark.parametrize(
    ("value", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_the_environment_switches_settings_on(monkeypatch, setting, value, is_on):
    variable = f"KVCUPY_{setting.upper()}"
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    assert getattr(Config(), setting) is (value == "1")


def test_recurring_warnings_are_counted_instead_of_logged(monkeypatch, caplog):
    now = [5.0]
    monkeypatch.setattr(
        sys.modules[BoundedLog.__module__], "time", SimpleNamespace(monotonic=lambda: now[0])
    )
    log = BoundedLog(logging.getLogger("kvcupy.cache"), interval_s=10)
    for number in range(4):
        log.warning("%d blocks: %s", number, "100 %")
    assert [r.getMessage() for r in caplog.records] == ["0 blocks: 100 %"]
    now[0] = 14.9
    log.warning("%d blocks: %s", 4, "too early")
    log.log(logging.ERROR, "another %s", "failure")
    now[0] = 15.0
    log.warning("%d blocks: %s", 5, "again")
    now[0] = 100.0
    log.warning("%d blocks: %s", 6, "late")
    assert [(r.levelname, r.getMessage()) for r in caplog.records[1:]] == [
        ("ERROR", "another failure"),
        ("WARNING", "5 blocks: again (and 4 more before)"),
        ("WARNING", "6 blocks: late"),
    ]


def test_an_unknown_setting_is_refused():
    with pytest.raises(AttributeError, match="nosuch"):
        Config().nosuch = True
