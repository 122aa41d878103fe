"""Paged KV-cache management for JAX serving stacks on NVIDIA GPUs.

Importing this package imports nothing else: take what you need from its modules.
Planning and bookkeeping run without jax, the rest needs it.

  jaxkv.specs, jaxkv.groups, jaxkv.planning, jaxkv.models   what fits (no jax)
  jaxkv.kernel_blocks                                       what kernels work on (no jax)
  jaxkv.blocks                                              who holds which block (no jax)
  jaxkv.block_tables, jaxkv.step                            tables on the device
  jaxkv.pool                                                bytes on the device
  jaxkv.flex_attention                                      which pages a query group reads
  jaxkv.testing                                             references for your own tests
"""

__version__ = "0.1.0.dev0"
