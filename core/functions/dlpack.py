"""DALI's tensors for DLPack: capsules, and objects for ``from_dlpack``."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import MutableSequence
from typing import Any, ClassVar

import jax
import numpy as np

NO_WAIT = -1  # DLPack's stream number for no synchronization
_HOST = (1, 0)  # kDLCPU of dlpack.h
_CUDA = 2  # kDLCUDA
_NOT_XLAS = (None, 1, 2, NO_WAIT)  # streams that XLA doesn't use: CUDA's default streams, or none
_ALIGNED = 16  # bytes; the alignment that XLA's programs on a GPU require


class Header(ctypes.Structure):
    """The DLTensor struct of dlpack.h, which begins a capsule's struct."""

    _fields_: ClassVar[Any] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]

    @property
    def address(self) -> int:
        """The address of the first element, in bytes."""
        return (self.data or 0) + int(self.byte_offset)

    @property
    def dtype(self) -> str:
        """The name of the dtype: "int32", "uint8" or "float16"; "other8" for other 8-bit kinds."""
        return {0: "int", 1: "uint", 2: "float"}.get(self.code, "other") + str(self.bits)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def header(capsule: Any) -> Header:
    """Returns the header of a capsule that ``from_dlpack`` has not consumed yet."""
    return Header.from_address(_pointer(capsule, b"dltensor"))


class Exported:
    """A DLPack capsule with the two methods that ``from_dlpack`` calls."""

    def __init__(self, capsule: Any, device: tuple[int, int]):
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        """Returns the capsule."""
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the device type and number, as in dlpack.h."""
        return self._device


def owning_view(tensor: Any) -> np.ndarray:
    """Returns a CPU batch of DALI as a read-only array, which keeps DALI's memory alive."""
    view: np.ndarray = np.from_dlpack(Exported(tensor.__dlpack__(None), _HOST))
    return view


class DLTensor:
    """A tensor of DALI on a GPU, for ``from_dlpack`` of JAX, CuPy or PyTorch.

    ``from_dlpack`` can consume it once. The resulting array is valid until the user's function
    returns. Pass the object itself to JAX: an array of CuPy may have an address that XLA rejects.
    ``cupy.from_dlpack(x.__dlpack__())`` is faster than ``cupy.from_dlpack(x)``, which first asks
    for the device and switches to it.

    Args:
        device_id: The number of the GPU.
        copies: A list to which copies of misaligned samples are added. It keeps the copies alive:
            JAX owns them, and doesn't know when other libraries' streams have finished using them.
            None: samples are never copied, because DALI's stream may not have written them yet.
        capsule: A DLPack capsule that was not consumed yet.
    """

    __slots__ = ("_capsule", "_copies", "_device_id")

    def __init__(self, device_id: int, copies: MutableSequence[Any] | None, capsule: Any):
        self._device_id = device_id
        self._copies = copies
        self._capsule = capsule

    def __dlpack__(
        self,
        stream: int | None = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns DALI's capsule, or the capsule of a copy.

        By default DALI has synchronized its stream before, so the consumer needn't wait. The
        samples of a batch are contiguous, so a sample may be at an address that XLA's programs
        reject. This sample is copied if ``stream`` may be a stream of XLA.

        Args:
            stream: The consumer's stream; None for CUDA's default stream, -1 for no
                synchronization.
            max_version: Ignored: DALI's capsules have no version.
            dl_device: None, or the tensor's own device.
            copy: None or False.

        Raises:
            BufferError: If another device or a copy is requested.
            RuntimeError: If the tensor was consumed already.
        """
        capsule = self._capsule
        if capsule is None or copy or dl_device is not None:  # one fast test for the usual case
            self._check(dl_device, copy)
        self._capsule = None
        # This test comes first: reading the address takes as long as CuPy's from_dlpack itself.
        if stream in _NOT_XLAS or self._copies is None:
            return capsule
        if header(capsule).address % _ALIGNED == 0:
            return capsule
        copied: Any = aligned(Exported(capsule, self.__dlpack_device__()))
        self._copies.append(copied)
        return copied.__dlpack__(stream=stream)

    @property
    def dtype(self) -> str:
        """The name of the dtype; raises RuntimeError after the tensor was consumed."""
        return header(self._untaken()).dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns DLPack's device type of CUDA, and the number of the GPU."""
        return _CUDA, self._device_id

    def _check(self, dl_device: tuple[int, int] | None, copy: bool | None) -> None:
        self._untaken()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError(
                f"copy={copy}, dl_device={dl_device}: DALI's tensors are passed on their own "
                "device, without a copy. Copy the result of from_dlpack"
            )

    def _untaken(self) -> Any:
        if self._capsule is None:
            raise RuntimeError(
                "from_dlpack can be called only once for a tensor of DALI. Use its first result"
            )
        return self._capsule


def aligned(exported: Exported) -> jax.Array:
    """Returns a copy of a tensor at an address that XLA accepts, without running a program."""
    # Without 64-bit types JAX would narrow int64, and run a program for the conversion.
    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:  # before JAX 0.8
        enable_x64 = importlib.import_module("jax.experimental").enable_x64
    with enable_x64(True):
        array = jax.dlpack.from_dlpack(exported)
        return jax.device_put(array, array.device, may_alias=False)
