"""The native threads: cores that are really there, rest when idle, forks, calls from many threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from edgellm_kernels import native_threads, norm_native
from tests.support.native_cases import needs_native, threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_cores_are_those_that_control_groups_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2 with limits at two levels, version 1, no limit, and files that make no sense."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert native_threads.available_cores(tmp_path) == 8
    write(tmp_path / "proc/self/cgroup", "0::/user/job\n")
    group = tmp_path / "sys/fs/cgroup"
    write(group / "user/job/cpu.max", "max 100000\n")
    assert native_threads.available_cores(tmp_path) == 8
    write(group / "user/cpu.max", "350000 100000\n")
    assert native_threads.available_cores(tmp_path) == 3
    write(group / "user/job/cpu.max", "50000 100000\n")
    assert native_threads.available_cores(tmp_path) == 1
    write(tmp_path / "proc/self/cgroup", "4:memory:/x\n5:cpu,cpuacct:/docker/abc\n")
    write(group / "cpu/cpu.cfs_quota_us", "200000\n")
    write(group / "cpu/cpu.cfs_period_us", "100000\n")
    assert native_threads.available_cores(tmp_path) == 2
    write(group / "cpu/cpu.cfs_quota_us", "-1\n")
    assert native_threads.available_cores(tmp_path) == 8
    write(group / "cpu/cpu.cfs_period_us", "nonsense\n")
    assert native_threads.available_cores(tmp_path) == 8


def norms(rows: int = 256) -> torch.Tensor:
    x = torch.arange(rows * 64, dtype=torch.float32).view(rows, 64)
    return norm_native.add_rms_norm(None, x, torch.ones(64), 1e-6)[0].values


def worker_seconds() -> float:
    """Processor time of this process's native threads, from /proc."""
    ticks, found = 0, 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name, stat = (task / "comm").read_text().strip(), (task / "stat").read_text()
        except OSError:
            continue
        if name == "edgellm-worker":
            found += 1
            fields = stat.rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    assert found > 0, "no native thread was started"
    return ticks / os.sysconf("SC_CLK_TCK")


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_idle_threads_use_no_processor() -> None:
    """Under 1% of a core once there has been no work for a while."""
    with threads(3):
        norms()
        time.sleep(0.2)
        before = worker_seconds()
        time.sleep(1.0)
        assert worker_seconds() - before <= 0.01


@needs_native
def test_calls_from_many_threads_take_turns() -> None:
    expected = norms()
    found: list[bool] = []

    def call() -> None:
        for _ in range(20):
            found.append(torch.equal(norms(), expected))

    with threads(2):
        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
    assert len(found) == 80 and all(found)


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_and_both_end() -> None:
    """In a process of its own: this one has threads that a fork would not take along."""
    code = (
        "import os, sys; from tests.cpu.test_native_pool import norms, native_threads; import torch\n"
        "native_threads.set_threads(3); torch.set_num_threads(1); expected = norms()\n"
        "child = os.fork()\n"
        "same = torch.equal(norms(), expected)\n"
        "if child == 0: os._exit(0 if same else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if same else 4))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120)
    assert done.returncode == 0
