"""The native library of the data plane: found, loaded and asked (`library`), compiled for this machine (`cache`)."""

from kvpager.native.library import NativeStatus, active_cpu_isa, gpu_arch, native_status, select_cpu_isa

__all__ = ["NativeStatus", "active_cpu_isa", "gpu_arch", "native_status", "select_cpu_isa"]
