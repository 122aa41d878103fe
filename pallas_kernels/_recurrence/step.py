"""The Mosaic GPU kernel of recurrent steps: a few tokens of each request, states in place.

A state moves once in and once out: rows of it come to shared memory by TMA, are updated in
registers, and are stored from there. The rows of a state are independent of each other, given
the key and the query, so that a thread block works on one tile of them after another, and loads
the next ones meanwhile. Thread blocks start in the order of the memory that they read; ones that
stay, and go from state to state, drift apart, and were 3 to 10 % slower on an H200.

The convolution before the recurrence is part of the kernel where one thread block computes all
value heads of a key head: then each input of the convolution is read and moved on by one block.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _capability
from pallas_kernels._bitcast import as_elements, from_words
from pallas_kernels._mosaic import Ref, Scratch, call_unfused, tiled_by, writable, written
from pallas_kernels._recurrence.rule import Convolution, Requests, Rule, Tokens
from pallas_kernels._recurrence.step_convolution import outputs_scratch
from pallas_kernels._recurrence.step_decode import ReplayDecoder
from pallas_kernels._recurrence.step_decode_mma import MmaReplayDecoder
from pallas_kernels._recurrence.step_drafts import DraftReplayer
from pallas_kernels._recurrence.step_kernel import Stepper
from pallas_kernels._recurrence.step_replay import Replayer
from pallas_kernels._recurrence.step_shape import StepShape, step_shape

MOST_HEADS = 4  # of a key head, with rings, whose shared memory grows with them
LEAST_ITEMS = 2  # per SM, for the convolution to be a part of the kernel


def step_mosaic(
    rule: Rule,
    tokens: Tokens,
    requests: Requests,
    conv: Convolution | None,
    most: int,
    outputs: jax.ShapeDtypeStruct | Array,
) -> tuple[Array, Array]:
    """Returns the data of the pages with the new states, and the outputs.

    Args:
      conv: the convolution, if it is to be a part of the kernel; then requests have one token.
      most: most tokens of a request.
      outputs: [T or more, value_heads, V]; undefined for tokens of no request. Of an array, these
        tokens keep what they have.
    """
    shape = step_shape(rule, tokens, requests, conv, most)
    states, width = tokens.states, rule.key_size
    pages = as_elements(states.data, states.dtype, (-1, width))
    operands = _operands(shape, tokens, requests, conv)
    head = states.start // (width * states.itemsize)
    conv_start = 0 if conv is None else conv.pages.start // states.itemsize
    rings: tuple[int, ...] = ()
    if tokens.replay is not None:
        rings = tuple(part.start // (width * states.itemsize) for part in tokens.replay.arrays)

    def kernel(*refs: Ref) -> None:
        if shape.drafts:
            DraftReplayer(shape, head, conv_start, rings, refs).run()
        elif shape.replay and shape.tokens == 1:
            decoder = MmaReplayDecoder if shape.page == jnp.bfloat16 else ReplayDecoder
            decoder(shape, head, conv_start, rings, refs).run()
        elif shape.replay:
            Replayer(shape, head, conv_start, rings, refs).run()
        else:
            Stepper(shape, head, conv_start, refs).run()

    call = plgpu.kernel(
        kernel,
        out_type=[] if isinstance(outputs, Array) else [outputs],
        grid=((shape.at_once or shape.batch) * shape.items_of_request,),
        grid_names=("cta",),
        kernel_name="recurrent_replay" if shape.replay else "recurrent_step",
        scratch_types=_scratch(shape),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # With rings, those that are needed are in the code: the others are 100.
            unsafe_no_auto_barriers=shape.replay > 0 and shape.by_tma,
        ),
    )
    refs = [writable(array) for array in (pages, outputs) if isinstance(array, Array)]
    found = call_unfused(call, operands, refs)
    written_pages, *out = map(written, refs)
    return from_words(written_pages, states.data), [*out, *found][0]


def _operands(
    shape: StepShape, tokens: Tokens, requests: Requests, conv: Convolution | None
) -> list[Array]:
    """Returns the arrays that the kernel reads, in the order of `Stepper`."""
    states, width = tokens.states, shape.rule.key_size
    first = states.first * (states.extent_bytes // (width * states.itemsize))
    log_decay = tokens.log_decay.astype(jnp.float32)
    operands = [
        jnp.asarray(first, jnp.int32).reshape(1),
        requests.read_ids,
        requests.write_ids,
        *([requests.tokens_before()] if shape.replay else []),
        *(requests.spans.arrays() if requests.spans else ()),
        log_decay.reshape(log_decay.shape[0], -1),
        tokens.beta.astype(jnp.float32),
    ]
    if conv is None:
        return [*operands, tokens.inputs]
    bias = [] if conv.bias is None else [conv.bias[None]]
    for array in (tokens.inputs, conv.weights, *bias):
        array = array.astype(conv.pages.dtype)
        operands.append(as_elements(array, states.dtype, (-1, array.shape[1] // shape.packed)))
    return operands


def _scratch(shape: StepShape) -> list[Scratch]:
    scratch: list[Scratch] = [plgpu.SMEM(size, dtype) for size, dtype in shape.scratch]
    if shape.conv_width:
        scratch[-1 - len(shape.ring_scratch)] = outputs_scratch(shape)
    if not shape.by_tma:  # Mosaic copies by cp.async to tiles only
        size, dtype = shape.scratch[0]
        return [tiled_by(size, dtype, 128), *scratch[1:]]
    return [
        *scratch,
        plgpu.Barrier(num_barriers=shape.stages),
        *([plgpu.Barrier(num_arrivals=shape.copies)] if shape.copies else []),
    ]


def can_fuse(rule: Rule, tokens: Tokens, requests: Requests, conv: Convolution) -> bool:
    """Returns whether the convolution can be, and is better, a part of the kernel of the step."""
    states, pages = tokens.states, conv.pages
    if _capability.instructions_of("recurrent_step") == "cp.async":  # short rows take TMA
        return False
    if rule.key_size % 128 or rule.value_size % 128 or requests.spans is not None:
        return False
    if conv.takes_drafts or (tokens.replay is not None and rule.group > MOST_HEADS):
        return False
    ratio = states.itemsize // pages.itemsize
    dtype = jnp.dtype(pages.dtype)
    if dtype != jnp.dtype(states.dtype) and not (ratio == 2 and dtype == jnp.bfloat16):
        return False
    given = [conv.weights] if conv.bias is None else [conv.weights, conv.bias]
    if dtype != jnp.float32 and any(array.dtype != dtype for array in given):  # would be rounded
        return False
    row = rule.key_size * states.itemsize
    segment_bytes = max(rule.key_size, rule.value_size) * pages.itemsize
    # A segment of inputs, of one head, lies within a row of the pages.
    aligned = row % segment_bytes == 0 and pages.start % segment_bytes == 0
    aligned &= (rule.columns * pages.itemsize) % segment_bytes == 0
    items = requests.batch * rule.key_heads
    enough = items >= LEAST_ITEMS * _capability.SMS_WITHOUT_GPU or rule.group <= 4
    if not (states.are_beside(pages) and aligned and enough):
        return False
    needed = step_shape(rule, tokens, requests, conv, 1).shared_bytes
    return needed <= _capability.shared_memory_bytes()
