"""The Mosaic GPU kernel that passes states through the chunks of prompts, in order.

A thread block has 64 values of one head, and goes from chunk to chunk of one request. The state
stays in registers, where it is an operand of products as it is: everything else is transposed, with
values as rows.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic import Ref, call_unfused
from pallas_kernels._recurrence.chunks import CHUNK
from pallas_kernels._recurrence.prompt_scratch import StatesScratch
from pallas_kernels._recurrence.prompt_shape import PromptParts, PromptShape
from pallas_kernels._recurrence.prompt_states_mma import MmaBlock
from pallas_kernels._recurrence.prompt_states_wgmma import WgmmaBlock


def pass_states(
    shape: PromptShape,
    runs: Array,
    chunks: Array,
    parts: PromptParts[Array],
    decay: Array | None,
    inputs: Array,
    carried: Array,
    pages: Ref,
    out: Ref,
) -> Array:
    """Writes the outputs of a turn's chunks, and the states that its chunks name.

    Args:
      runs: int32[B, 4], of each request: its first chunk of this turn, one past the last, the
        first row of the state to resume from, or `NOTHING`, or `CARRIED`, and whether to carry the
        state for the next turn.
      chunks: int32[N, 4 + W], as for `find_parts`, and at last the first rows of the pages that
        take the state after the chunk, or `NOTHING`, after the largest of them.
      decay: float32[N, value_heads, COPIED], of chunks, if each key channel has its own, K of them;
        otherwise None.
      carried: float32[value_heads * V, K], the state carried over from the turn before.
      pages: reference to [rows, K].
      out: reference to [T, value_heads, V], T a multiple of 8.

    Returns:
      The state to carry over to the next turn; undefined if no run goes on.
    """
    rule, block = shape.rule, WgmmaBlock if shape.by_wgmma else MmaBlock
    call = plgpu.kernel(
        lambda *refs: block(shape, refs).run(),
        out_type=[jax.ShapeDtypeStruct(carried.shape, jnp.float32)],
        grid=(shape.batch * rule.value_heads * (rule.value_size // CHUNK),),
        grid_names=("cta",),
        kernel_name="recurrent_prompt_states",
        scratch_types=[StatesScratch.from_shape(shape, out.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )
    decays = [] if decay is None else [decay]
    return call_unfused(call, [runs, chunks, *parts, *decays, inputs, carried], [pages, out])[0]
