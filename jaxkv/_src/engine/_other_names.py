"""Options of vLLM's engine, and what to write here instead. No jax."""

PROCESSORS = {
    "allowed_token_ids": "AllowedTokens",
    "frequency_penalty": "FrequencyPenalty",
    "logit_bias": "LogitBias",
    "min_tokens": "MinTokens",
    "presence_penalty": "PresencePenalty",
    "repetition_penalty": "RepetitionPenalty",
    "structured_outputs": "TokenAutomaton",
}
OF_SAMPLING = {
    "stop": "it knows token ids, no texts: pass stop_token_ids, or end a request whose text holds "
    "a stop string by Engine.abort",
    "eos_token_id": "pass stop_token_ids",
    "max_new_tokens": "pass max_tokens",
} | {
    name: f"pass processors={{{processor}: ...}}, with one of "
    f"jaxkv.logits_processors.{processor} in Engine(logits_processors=)"
    for name, processor in PROCESSORS.items()
}
OF_ENGINE = {
    "model": "pass forward and params, functions and weights of your own",
    "max_num_seqs": "pass max_requests",
    "max_num_batched_tokens": "pass max_tokens",
    "max_model_len": "pass it to plan_cache",
    "block_size": "pass it to layers_from_config, or to the layers' specs",
    "kv_cache_dtype": "pass kv_dtype to layers_from_config, or dtype to the layers' specs",
    "num_gpu_blocks_override": "pass num_blocks_override to plan_cache",
    "gpu_memory_utilization": "pass bytes to plan_cache, as planning.memory_for(utilization=) "
    "counts them",
    "tensor_parallel_size": "pass tensor_parallel to layers_from_config, and cache=make_cache(plan,"
    " max_requests=..., mesh=..., axis=...)",
    "enable_prefix_caching": "prefixes are always cached; salt= of Engine.add keeps one apart",
    "enable_chunked_prefill": "prompts always come in chunks; chunk_tokens is their size",
    "kv_offloading_size": "pass host_memory=jaxkv.HostMemory(...)",
    "speculative_config": "pass drafts, an object of jaxkv.drafts",
}
