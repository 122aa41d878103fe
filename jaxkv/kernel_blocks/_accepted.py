"""Which block sizes an attention backend accepts, as data. Calls no backend."""

import dataclasses
import types
from collections.abc import Mapping

from jaxkv.checks import check_positive


@dataclasses.dataclass(frozen=True)
class AcceptedSizes:
    """Block sizes in tokens that a backend accepts: those listed, and all multiples.

    exact: sizes accepted one by one.
    multiples_of: every multiple of it is accepted too; None: only `exact` is. A backend
      that accepts any size says ``multiples_of=1``.

    Raises:
      ValueError: neither is given, so that no size would do.
    """

    exact: tuple[int, ...] = ()
    multiples_of: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.exact, int):
            raise TypeError(f"exact must be a tuple of sizes, got {self.exact!r}; add a comma")
        object.__setattr__(self, "exact", tuple(self.exact))
        check_positive(**{f"exact[{i}]": size for i, size in enumerate(self.exact)})
        if self.multiples_of is not None:
            check_positive(multiples_of=self.multiples_of)
        elif not self.exact:
            raise ValueError(
                "AcceptedSizes accepts nothing; give exact sizes, or multiples_of=1 for any"
            )

    def accepts(self, tokens: int) -> bool:
        """Does the backend work on blocks of so many tokens?"""
        multiple = self.multiples_of is not None and tokens % self.multiples_of == 0
        return multiple or tokens in self.exact

    def __str__(self) -> str:
        listed = [str(size) for size in sorted(self.exact)]
        if self.multiples_of is not None:
            listed.append(f"multiples of {self.multiples_of}")
        return " or ".join(listed)


# What can be read off installed code, no more; pass your own mapping for anything else.
JAX_BACKENDS: Mapping[str, AcceptedSizes] = types.MappingProxyType(
    {
        # jaxkv.pool.read_tokens and read_rows gather whole blocks with XLA.
        "jaxkv_gather": AcceptedSizes(multiples_of=1),
        # jax.experimental.pallas.ops.gpu.paged_attention, deprecated: it works on arrays of
        # whole pages, and Triton takes powers of two only (jax/_src/pallas/triton/
        # lowering.py, jax 0.12.0). Those in common use; others may do as well.
        "pallas_triton_paged_attention": AcceptedSizes(exact=(16, 32, 64, 128, 256)),
        # jax._src.cudnn paged_attention: check_layout compares numbers of blocks and looks
        # at no block size (jax 0.12.0); what cuDNN itself refuses is not in that code.
        "cudnn_paged_attention": AcceptedSizes(multiples_of=1),
    }
)
