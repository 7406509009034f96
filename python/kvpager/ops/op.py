"""An op on one card: its schema, its checks and its reference, which register themselves, and how a wrapper calls it.

Every op writes into tensors it is given and returns nothing, so a captured graph or a compiled step allocates nothing.
The caches are HND, [N, K, S, D], with any strides over the first three dimensions; the wrappers turn NHD into views.

The kernels are the native library's (csrc/cpu/, csrc/cuda/). Where it has none for a device, the reference is
registered instead. The kernels check what they are given, so a good call pays for nothing twice: the checks here word
what a kernel refused, and stand before the reference.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from kvpager.errors import ArgumentError, KVPagerError
from kvpager.native import native_status
from kvpager.ops import device_errors
from kvpager.ops.device_errors import REFUSALS, refused_number, typed_error

NAMESPACE = "kvpager"
library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]

# A schema's types as an error has them.
_TENSORS = {"Tensor": "a tensor", "Optional[Tensor]": "a tensor or None"}


class Op:
    """One op, registered when it is made.

    Lengths that change from step to step are SymInt in a schema: with `int`, torch.compile would compile anew for each.

    Args:
        name: in `torch.ops.kvpager`.
        schema: arguments and results; what is written is marked.
        check: takes what the op takes and raises before anything is written, from metadata alone: it is the fake, too.
        reference: takes what the op takes, checked, and does it in plain torch, after checking the values.
        has_cuda_kernel: whether the native library has a kernel for CUDA.
        made: the argument that the wrapper makes if a caller gives none; `check` takes None for it.

    Attributes:
        call: the registered op, without the lookup by overload at each call. A wrapper that makes a result calls it
            and `refuse` itself, which costs less than calling the card.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        check: Callable[..., None],
        reference: Callable[..., None],
        *,
        has_cuda_kernel: bool = True,
        made: str = "",
    ) -> None:
        self.name, self.schema = name, schema
        self.check, self.reference, self.made = check, reference, made
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", check, lib=library)
        status = native_status()
        for is_native, key in ((status.loaded, "CPU"), (status.cuda_kernels and has_cuda_kernel, "CUDA")):
            if not is_native:
                library.impl(name, self.checked_reference, key)  # type: ignore[no-untyped-call]
        self.call: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
        OPS[name] = self

    def checked_reference(self, *arguments: Any, **options: Any) -> None:
        """The kernel in plain torch."""
        self.check(*arguments, **options)
        self.reference(*arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Call the op, and say what was wrong in the words of `check` if it refuses."""
        try:
            self.call(*arguments, **options)
        except REFUSALS as error:
            self.refuse(error, *arguments, **options)
        if device_errors.CHECKED:
            check_errors(next(argument.device for argument in arguments if isinstance(argument, Tensor)))

    def refuse(self, error: Exception, *arguments: Any, **options: Any) -> NoReturn:
        """Raise what was wrong with a call that failed, named as the caller sees it."""
        if isinstance(error, KVPagerError):
            raise error
        try:
            self._check_kinds(arguments, options)
            if refusal := refused_number(error):
                raise refusal
            self.check(*arguments, **options)
        except (ArgumentError, TypeError) as refusal:
            raise refusal from None
        raise typed_error(error) from None

    def _check_kinds(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Refuses options that the op lacks, and what stands where its schema has a tensor and is none."""
        kinds = {argument.name: str(argument.type) for argument in self.call._schema.arguments}
        if self.made:
            kinds[self.made] = "Optional[Tensor]"
        for name, value in (*zip(kinds, arguments, strict=False), *options.items()):
            if name not in kinds:
                raise TypeError(f"{self.name}() got an unexpected keyword argument '{name}'")
            wanted = _TENSORS.get(kinds[name])
            if wanted and not isinstance(value, Tensor) and not (value is None and wanted.endswith("None")):
                raise ArgumentError(name, wanted, type(value).__name__)


OPS: dict[str, Op] = {}


def _check_word(word: Tensor) -> None:
    """The error word is made by `check_errors` alone."""


# Moves the device's error word into `word` [1] int64 and clears it, in stream order. The reference kernels raise at
# once, so nothing is ever pending there.
_TAKE_ERRORS = Op("take_errors", "(Tensor(a!) word) -> ()", _check_word, lambda word: word.zero_())


def check_errors(device: str | torch.device | None = None) -> None:
    """Raise what kernels found wrong on `device` since the last call, and forget it.

    Waits for the device. A no-op on the CPU, where errors are raised at once.

    Args:
        device: the device to ask; the current CUDA device if None, or the CPU where there is none.

    Raises:
        SlotError: a slot or block id outside the pool was met; its row was skipped.
        ArgumentError: a length or query start that does not fit was met; its rows were skipped.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    word = torch.empty(1, dtype=torch.int64, device=device)
    _TAKE_ERRORS.call(word)
    if error := device_errors.error_of(int(word.item())):
        raise error
