"""Choice between the two implementations of a kernel, for each buffer or for a whole call."""

from collections.abc import Callable, Sequence
from typing import get_args

from jax import Array, lax

from pallas_kernels import _capability
from pallas_kernels._arguments import PagedBuffer, check_choice
from pallas_kernels._capability import Implementation

# Takes buffers and a tree of operand arrays, and returns the pages of the buffers.
type Kernel[T] = Callable[[list[PagedBuffer], T], list[Array]]


def run[T](
    buffers: list[PagedBuffer],
    operands: T,
    implementation: Implementation | None,
    *,
    kernel: _capability.Kernel,
    mosaic_gpu: Kernel[T],
    xla: Kernel[T],
) -> list[Array]:
    """Runs the given implementation, or with None the best one for each buffer.

    Args:
      kernel: the Mosaic kernel.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` on a machine that cannot run it.
      TypeError: ``"mosaic_gpu"`` with a buffer dtype that it cannot store.
    """
    check_choice(get_args(Implementation), implementation=implementation)
    match implementation:
        case None:
            if _capability.why_unsupported([kernel]):
                return xla(buffers, operands)
            return _run_best(buffers, operands, mosaic_gpu, xla)
        case "xla":
            return xla(buffers, operands)
        case "mosaic_gpu":
            _check_mosaic(buffers, kernel)
            return mosaic_gpu(buffers, operands)


def choose[T](
    implementation: Implementation | None,
    unsupported: str | None,
    *,
    kernels: Sequence[_capability.Kernel],
    mosaic_gpu: Callable[[], T],
    xla: Callable[[], T],
) -> T:
    """Runs the given implementation of a whole call, or with None the best one.

    Args:
      unsupported: why Mosaic cannot run the call, or None.
      kernels: the Mosaic kernels of the call; if the GPU does not run one of them, XLA runs all.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: ``"mosaic_gpu"`` for a call or on a machine that it does not support.
    """
    check_choice(get_args(Implementation), implementation=implementation)
    if implementation == "mosaic_gpu":
        unsupported = unsupported or _capability.why_unsupported(kernels, any_platform=True)
        if unsupported:
            raise NotImplementedError(f'implementation="mosaic_gpu": {unsupported}; use "xla"')
        return mosaic_gpu()
    if implementation == "xla" or unsupported or _capability.why_unsupported(kernels):
        return xla()
    # Chosen when the program is compiled, which may be for the CPU of a machine with a GPU.
    return lax.platform_dependent(cuda=mosaic_gpu, default=xla)


def _run_best[T](
    buffers: list[PagedBuffer], operands: T, mosaic_gpu: Kernel[T], xla: Kernel[T]
) -> list[Array]:
    """Runs Mosaic for the dtypes that it can store, and XLA otherwise."""
    stored = [buffer for buffer in buffers if _capability.can_store(buffer.pages.dtype)]
    if not stored:
        return xla(buffers, operands)
    others = [buffer for buffer in buffers if not _capability.can_store(buffer.pages.dtype)]

    def on_stored(kernel: Kernel[T]) -> Callable[[list[Array], T], list[Array]]:
        def on_pages(pages: list[Array], operands: T) -> list[Array]:
            pairs = zip(stored, pages, strict=True)
            return kernel([buffer._replace(pages=traced) for buffer, traced in pairs], operands)

        return on_pages

    # Chosen when the program is compiled, which may be for the CPU of a machine with a GPU.
    done = lax.platform_dependent(
        [buffer.pages for buffer in stored],
        operands,
        cuda=on_stored(mosaic_gpu),
        default=on_stored(xla),
    )
    by_mosaic, by_xla = iter(done), iter(xla(others, operands) if others else [])
    return [
        next(by_mosaic if _capability.can_store(buffer.pages.dtype) else by_xla)
        for buffer in buffers
    ]


def _check_mosaic(buffers: list[PagedBuffer], kernel: _capability.Kernel) -> None:
    reason = _capability.why_unsupported([kernel], any_platform=True)
    if reason:
        raise NotImplementedError(f'implementation="mosaic_gpu": {reason}; use "xla"')
    for buffer in buffers:
        if not _capability.can_store(buffer.pages.dtype):
            raise TypeError(
                f'implementation="mosaic_gpu" cannot store {buffer.pages.dtype}; use "xla" or '
                f"one of {', '.join(_capability.DTYPES)}"
            )
