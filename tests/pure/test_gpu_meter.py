"""The use of the GPU: from the driver's library, or what stands for it here, to the panel's snapshot."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from edgellm.client.http_client import HttpClient
from edgellm.client.wire import engine_stats
from edgellm.contracts import EngineStats, GpuUse
from edgellm.engine.stats import StatsRecorder
from edgellm.server import gpu_meter, model_routes
from edgellm.server.gpu_meter import GpuMeter
from tests.support.served import Scripted, scripted_model, serving

NOT_SUPPORTED = 3


class FakeNvml:
    """GPUs as NVML tells of them; ``lacks`` are functions that a driver does not have."""

    def __init__(
        self, *pids: list[int], lacks: tuple[str, ...] = (), unsupported: tuple[str, ...] = ()
    ) -> None:
        self._pids = pids
        self._lacks = lacks
        self._unsupported = unsupported
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in self._lacks:
            raise AttributeError(name)
        if name in self._unsupported:
            return lambda *arguments: NOT_SUPPORTED
        return getattr(self, f"do_{name}")

    def do_nvmlInit_v2(self) -> int:
        return 0

    def do_nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._pids)
        return 0

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0

    def do_nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, found: Any) -> int:
        for place, pid in enumerate(self._pids[device.value - 1]):
            found[place].pid = pid
        count._obj.value = len(self._pids[device.value - 1])
        return 0

    def do_nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        self.reads += 1
        memory._obj.total, memory._obj.used = 12_000_000_000, 1_000_000_000 * device.value
        return 0

    def do_nvmlDeviceGetUtilizationRates(self, device: Any, rates: Any) -> int:
        rates._obj.gpu = 63
        return 0

    def do_nvmlDeviceGetPowerUsage(self, device: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 143_500
        return 0

    def do_nvmlDeviceGetTemperature(self, device: Any, sensor: Any, celsius: Any) -> int:
        assert sensor.value == 0
        celsius._obj.value = 71
        return 0


def test_what_the_driver_tells_and_what_it_does_not() -> None:
    nvml = FakeNvml([])
    meter = GpuMeter(lambda: nvml)
    assert meter.read() == GpuUse(1_000_000_000, 12_000_000_000, 0.63, 143.5, 71.0)
    assert meter.read() is not None and nvml.reads == 1  # not again within a second
    less = FakeNvml([], lacks=("nvmlDeviceGetTemperature",), unsupported=("nvmlDeviceGetUtilizationRates",))
    assert GpuMeter(lambda: less).read() == GpuUse(1_000_000_000, 12_000_000_000, None, 143.5, None)


def test_the_gpu_of_this_process_is_the_one_that_is_read() -> None:
    use = GpuMeter(lambda: FakeNvml([1], [2, os.getpid()], [])).read()
    assert use is not None and use.memory_used_bytes == 2_000_000_000
    assert GpuMeter(lambda: FakeNvml([1], [2])).read() is None  # it cannot be told which
    assert GpuMeter(lambda: FakeNvml()).read() is None


def test_without_such_a_driver_there_is_nothing_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuMeter(lambda: None).read() is None
    assert GpuMeter(lambda: FakeNvml([], unsupported=("nvmlInit_v2",))).read() is None
    monkeypatch.setattr(gpu_meter, "LIBRARIES", ("libno-such-driver.so.1",))
    assert gpu_meter.open_library() is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_use_of_the_gpu_reaches_who_asks_the_server(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([])
    monkeypatch.setattr(model_routes, "GpuMeter", lambda: GpuMeter(lambda: nvml))

    def make() -> Scripted:
        made = scripted_model()
        made.core.stats = StatsRecorder(device=device).snapshot(1.0, 0, 0, {})
        return made

    async def ask(address: str) -> EngineStats:
        async with await HttpClient.connect(address) as client:
            while not client.stats().time:
                await asyncio.sleep(0.01)
            return client.stats()

    with serving(make) as found:
        stats = asyncio.run(asyncio.wait_for(ask(found.address), 30))
    assert stats.device == device
    expected = GpuUse(1_000_000_000, 12_000_000_000, 0.63, 143.5, 71.0)
    assert stats.gpu == (expected if device == "cuda" else None)
    assert nvml.reads == (device == "cuda")


@pytest.mark.parametrize(
    "gpu",
    [None, "yes", {}, {"memory_used_bytes": 1}, {"memory_total_bytes": "9"}, {"memory_total_bytes": True}],
)
def test_a_gpu_that_a_server_tells_nonsense_about_is_none(gpu: Any) -> None:
    assert engine_stats({"stats": {"device": "cuda", "gpu": gpu}}).gpu is None
