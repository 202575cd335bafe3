"""The energy of a call, by the board's counter."""

from __future__ import annotations

import ctypes

import torch

from twellc.base.errors import UserError
from twellc.benchmarking.timing import Call


class EnergyMeter:
    """The energy counter of torch's first GPU, through NVML, which comes with the driver."""

    def __init__(self) -> None:
        """Open the counter.

        Raises:
            UserError: NVML is missing, or refuses.
        """
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise UserError("NVML", f"cannot be loaded ({error})") from error
        self._device = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
        self._demand(self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device)))
        self.joules()  # not every board has a counter

    @staticmethod
    def _demand(status: int) -> None:
        if status != 0:
            raise UserError("NVML", f"cannot read the energy counter of this GPU (error {status})")

    def joules(self) -> float:
        """Return the energy since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._demand(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    def of(self, call: Call, seconds: float, microseconds: float) -> float:
        """Return the joules of one call, from many calls in a row, after as many to warm up.

        Args:
            call: The call.
            seconds: How long the counted calls are to take.
            microseconds: The time of one call.
        """
        count = max(1, round(seconds * 1e6 / microseconds))
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        before = self.joules()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        return (self.joules() - before) / count
