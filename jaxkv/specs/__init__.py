"""What one layer stores per block, and which blocks a request must hold for it.

Knows bytes, tokens and blocks of a single layer. Knows nothing of other layers,
of pools or of memory, and never imports jax: planning has to run anywhere.

Words: a *block* is ``block_size`` tokens and the unit of allocation; a *page* is
what one layer stores for one block. A request of ``num_tokens`` tokens, of which
``num_computed_tokens`` are already in the cache, must hold the blocks that
`LayerSpec.live_blocks` names; `LayerSpec.max_blocks` bounds their number over the
whole life of a request, and that bound is what admission charges.
"""

from jaxkv.specs._attention import ChunkedAttentionSpec as ChunkedAttentionSpec
from jaxkv.specs._attention import CrossAttentionSpec as CrossAttentionSpec
from jaxkv.specs._attention import FullAttentionSpec as FullAttentionSpec
from jaxkv.specs._attention import SlidingWindowSpec as SlidingWindowSpec
from jaxkv.specs._base import EncoderOnlySpec as EncoderOnlySpec
from jaxkv.specs._base import LayerSpec as LayerSpec
from jaxkv.specs._base import Limits as Limits
from jaxkv.specs._base import SharedKVSpec as SharedKVSpec
from jaxkv.specs._base import TokenSpec as TokenSpec
from jaxkv.specs._dtypes import canonical_dtype as canonical_dtype
from jaxkv.specs._dtypes import packed_bytes as packed_bytes
from jaxkv.specs._mla import MLASpec as MLASpec
from jaxkv.specs._mla import SlidingWindowMLASpec as SlidingWindowMLASpec
from jaxkv.specs._state import StateSpec as StateSpec
from jaxkv.specs._state import gated_delta_net_state as gated_delta_net_state
from jaxkv.specs._state import kda_state as kda_state
from jaxkv.specs._state import linear_attention_state as linear_attention_state
from jaxkv.specs._state import mamba1_state as mamba1_state
from jaxkv.specs._state import mamba2_state as mamba2_state
from jaxkv.specs._tensor_parallel import heads_per_rank as heads_per_rank
