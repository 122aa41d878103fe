"""Whole models of published sizes, served by `jaxkv.Engine` next to vLLM's engine."""
