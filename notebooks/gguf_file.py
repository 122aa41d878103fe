"""Reads a model of `hugging_face` from a GGUF file: `load`, and `load_tokenizer`."""

import pathlib
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from hugging_face import Config, with_dtype
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

KINDS = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}
FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}  # of a config.json, and of a GGUF
WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {"token_embd": "embed", "output_norm": "norm", "output": "head"}
LETTERS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How tokenizers cut a text into words; the first one cuts digits only.
WORDS = {
    "smollm": None,
    "llama-bpe": LETTERS + r"\p{N}{1,3}" + REST,
    "qwen2": LETTERS + r"\p{N}" + REST,
}


def load(file: str | pathlib.Path, dtype: Any = None) -> tuple[Config, dict[str, Any]]:
    """Reads config and weights as `hugging_face.load` does; None as dtype: bfloat16."""
    reader = gguf.GGUFReader(file)
    config = read_config(reader, file)
    gemma = config["model_type"] == "gemma3_text"
    names = WEIGHTS | GEMMA if gemma else WEIGHTS
    dtype = jnp.bfloat16 if dtype is None else dtype
    params: dict[str, Any] = {"layers": [{} for _ in range(config["num_hidden_layers"])]}
    for tensor in reader.tensors:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if name == "rope_freqs":
            raise ValueError(f"{file} stretches rotary waves by a table; pass the model's folder")
        if name in OUTSIDE:
            params[OUTSIDE[name]] = jnp.asarray(array.T if name == "output" else array, dtype)
            continue
        _, layer, kind = name.split(".")
        if config["model_type"] == "llama" and kind in ("attn_q", "attn_k"):
            # A GGUF of a llama holds side by side what rotates together.
            heads = config[f"num_{'attention' if kind == 'attn_q' else 'key_value'}_heads"]
            pairs = array.reshape(heads, -1, 2, array.shape[-1])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        params["layers"][int(layer)][names[kind]] = jnp.asarray(array.T, dtype)
    return with_dtype(config, dtype), params


def read_config(reader: gguf.GGUFReader, file: str | pathlib.Path) -> Config:
    """Returns the fields of a ``config.json``."""
    kind = _of(reader, "general.architecture")
    if kind not in KINDS:
        raise ValueError(f"{file} holds a model of {kind!r}; this reads {', '.join(KINDS)}")
    found = {name: _of(reader, f"{kind}.{field}") for name, field in FIELDS.items()}
    found = {name: value for name, value in found.items() if value is not None}
    vocab_size = len(_of(reader, "tokenizer.ggml.tokens"))
    return {"model_type": KINDS[kind], "vocab_size": vocab_size, **found}


def load_tokenizer(file: str | pathlib.Path) -> tuple[Tokenizer, str, list[int]]:
    """Returns the tokenizer, the chat template, and the tokens that end an answer."""
    reader = gguf.GGUFReader(file)
    how = _of(reader, "tokenizer.ggml.pre")
    if how not in WORDS:
        raise ValueError(
            f"{file} has a tokenizer of {how!r}; this knows {', '.join(WORDS)}: pass the model's "
            "folder, which holds a tokenizer.json"
        )
    tokens = _of(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _of(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    words = WORDS[how]
    first = (
        pre_tokenizers.Digits(individual_digits=True)
        if words is None
        else pre_tokenizers.Split(Regex(words), "isolated")
    )
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, letters])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _of(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    template = _of(reader, "tokenizer.chat_template")
    return tokenizer, template, [_of(reader, "tokenizer.ggml.eos_token_id")]


def _of(reader: gguf.GGUFReader, name: str) -> Any:
    """Returns a field's content; None if the file lacks it."""
    return reader.fields[name].contents() if name in reader.fields else None
