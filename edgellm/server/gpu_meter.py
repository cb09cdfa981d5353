"""How busy the GPU is: read from NVIDIA's management library, where there is one, at most once a second."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from edgellm.contracts import GpuUse

LOG = logging.getLogger(__name__)

READ_EVERY_S = 1.0
"""A reading serves so long, whoever asks."""

LIBRARIES = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1",)
MAX_PROCESSES = 256
CORE_SENSOR = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def open_library() -> Any | None:
    """NVML as the driver brings it; None on a machine without such a driver."""
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class GpuMeter:
    """Reads the GPU that this process computes on. Everything NVML does not tell is absent, and no error.

    ``library`` opens NVML; its functions return 0 where they did what they were asked (nvml.h).
    """

    def __init__(self, library: Callable[[], Any | None] = open_library) -> None:
        self._open = library
        self._library: Any | None = None
        self._device: ctypes.c_void_p | None = None
        self._tried = False
        self._use: GpuUse | None = None
        self._read_at = float("-inf")

    def read(self) -> GpuUse | None:
        """What is known of the GPU by now; takes milliseconds at most, and is for one thread at a time."""
        now = time.monotonic()
        if now - self._read_at < READ_EVERY_S:
            return self._use
        self._read_at = now
        if not self._tried:
            self._tried = True
            self._device = self._find()
        if self._device is not None:
            self._use = self._measure(self._device)
        return self._use

    def _call(self, name: str, *arguments: Any) -> bool:
        assert self._library is not None
        function = getattr(self._library, name, None)  # an old driver lacks the new ones
        return function is not None and function(*arguments) == 0

    def _find(self) -> ctypes.c_void_p | None:
        """The only GPU there is, else the one on which this process is at work."""
        self._library = self._open()
        if self._library is None or not self._call("nvmlInit_v2"):
            return None
        count = ctypes.c_uint(0)
        if not self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return None
        devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)):
                devices.append(device)
        if len(devices) > 1:
            # CUDA and NVML need not count in the same order.
            devices = [device for device in devices if os.getpid() in self._processes(device)]
        if len(devices) != 1:
            LOG.info("the use of the GPU is not shown: which of %d it is cannot be told", count.value)
            return None
        return devices[0]

    def _processes(self, device: ctypes.c_void_p) -> list[int]:
        count = ctypes.c_uint(MAX_PROCESSES)
        found = (_Process * MAX_PROCESSES)()
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        if not self._call(name, device, ctypes.byref(count), found):
            return []
        return [found[i].pid for i in range(min(count.value, MAX_PROCESSES))]

    def _measure(self, device: ctypes.c_void_p) -> GpuUse | None:
        memory, busy = _Memory(), _Utilization()
        milliwatts, celsius = ctypes.c_uint(0), ctypes.c_uint(0)
        if not self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)):
            return None
        knows_busy = self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(busy))
        knows_power = self._call("nvmlDeviceGetPowerUsage", device, ctypes.byref(milliwatts))
        sensor = ctypes.c_uint(CORE_SENSOR)
        knows_heat = self._call("nvmlDeviceGetTemperature", device, sensor, ctypes.byref(celsius))
        return GpuUse(
            memory_used_bytes=memory.used,
            memory_total_bytes=memory.total,
            busy=busy.gpu / 100 if knows_busy else None,
            watts=milliwatts.value / 1000 if knows_power else None,
            celsius=float(celsius.value) if knows_heat else None,
        )
