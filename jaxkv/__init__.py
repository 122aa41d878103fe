"""Paged KV-cache management for JAX serving stacks on NVIDIA GPUs.

Importing this package imports nothing else: take what you need from its modules.
Planning and bookkeeping run without jax, the rest needs it.

  jaxkv.specs, jaxkv.groups, jaxkv.planning, jaxkv.models   what fits (no jax)
  jaxkv.kernel_blocks                                       what kernels work on (no jax)
  jaxkv.blocks                                              who holds which block (no jax)
  jaxkv.flex_sizes                                          bytes of page lists (no jax)
  jaxkv.block_tables, jaxkv.step                            tables on the device
  jaxkv.pool                                                bytes on the device
  jaxkv.sleep                                               memory given back for a while
  jaxkv.flex_attention                                      which pages a query group reads
  jaxkv.plotting                                            pictures (matplotlib, no jax)
  jaxkv.testing                                             references, strategies, a state
                                                            machine and assertions of yours
"""

__version__ = "0.1.0.dev0"
