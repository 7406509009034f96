"""What `kvpager env` tells: what is installed, what is active, and why the rest is not. Never raises."""

import os
import platform
from importlib import import_module, metadata

from kvpager.config import cpu_features, default_dtype

# Flags that decide which kernels are fast, as Linux names them; the rest would only be noise.
_TELLING_FEATURES = (
    *("sse4_2", "f16c", "fma", "avx", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16"),
)
_OPTIONAL = {
    "transformers": "for comparisons with its attention",
    "gguf": "to load quantised GGUF files",
    "huggingface_hub": "to fetch models by name",
}


def describe() -> list[tuple[str, str]]:
    """Name and value of every line, in order."""
    torch_works, torch_line = _torch()
    lines = [
        ("kvpager", _installed("kvpager")),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch_line),
        ("allocator", _allocator()),
    ]
    if torch_works:
        lines += _native_library()
    else:
        lines += [
            (name, "inactive: torch does not load") for name in ("native library", "CPU kernels", "CUDA kernels", "GPU")
        ]
    lines += _cpu()
    lines += [(name, _installed(name, why)) for name, why in _OPTIONAL.items()]
    return lines


def _installed(package: str, why: str = "") -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" + (f" (needed {why})" if why else "; running from a folder of sources")


def _torch() -> tuple[bool, str]:
    try:
        torch = import_module("torch")
    except Exception as error:  # a broken torch fails with whatever its loader meets
        return False, f"does not load: {_reason(error)}"
    return True, f"{torch.__version__}, {torch.get_num_threads()} threads"


def _allocator() -> str:
    try:
        return f"kvpager._core {import_module('kvpager._core').__version__}"
    except Exception as error:  # missing, or built for another Python
        return f"inactive: {_reason(error)}; `make build` makes it"


def _native_library() -> list[tuple[str, str]]:
    import torch

    from kvpager.native import active_cpu_isa, native_status

    status = native_status()
    if torch.cuda.is_available():
        gpu = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    elif torch.version.cuda is None:
        gpu = "none: this torch is built without CUDA"
    else:
        gpu = f"none: torch (CUDA {torch.version.cuda}) sees no device"
    return [
        ("native library", f"loaded: {status.build}" if status.loaded else f"inactive: {status.reason}"),
        ("CPU kernels", f"{active_cpu_isa()}: {status.cpu_isa_reason}" if status.loaded else "reference kernels, slow"),
        ("CUDA kernels", f"inactive: {status.cuda_reason}" if status.cuda_reason else "active"),
        ("GPU", gpu),
    ]


def _cpu() -> list[tuple[str, str]]:
    features = cpu_features()
    telling = " ".join(feature for feature in _TELLING_FEATURES if feature in features)
    auto = ", ".join(f"{stored} → {default_dtype(stored, 'cpu')}" for stored in ("bfloat16", "float16"))
    return [
        ("CPU", f"{platform.machine()}, {os.cpu_count()} logical cores"),
        ("instruction sets", telling or "unknown on this system"),
        ("dtype auto", f"{auto} (float32 where this CPU has no fast arithmetic for the stored dtype)"),
    ]


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
