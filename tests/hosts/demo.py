"""The demo's engine over any mesh, and wrappers of its step that keep processes together."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.demo.model import Model, init_params, query_dtype
from jaxkv.testing import count_compilations
from tests.hosts.engine import MAX_REQUESTS, MAX_TOKENS, Engine, make_trace, serve_step

Step = Callable[..., tuple[jaxkv.KVCache, Any]]
CONFIG = {"num_hidden_layers": 1, "full_attention_interval": 1, "hidden_size": 64}
CONFIG |= {"intermediate_size": 64, "max_position_embeddings": 64}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}  # to divide by head


def demo_engine(mesh: Mesh, axis: str) -> Engine:
    """Returns the demo's engine over any mesh, by head or by position."""
    config = jaxkv.load_config("qwen3-next-demo") | CONFIG
    by_head, ranks = axis == "heads", mesh.shape[axis]
    layers = jaxkv.layers_from_config(
        config, kv_dtype="f32", tensor_parallel=ranks if by_head else 1
    )
    plan = jaxkv.plan_cache(
        layers,
        2**18,
        max_model_len=jaxkv.hf_config.model_len(config),
        limits=jaxkv.Limits(max_in_flight_tokens=MAX_TOKENS),
        context_parallel=1 if by_head else ranks,
        zero_policy="always",
    )
    model = Model(config, tuple(layers), query_dtype("f32"))
    same = NamedSharding(mesh, PartitionSpec())
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda like: everywhere(rng.normal(size=like.shape) / like.shape[0] ** 0.5, same),
        jax.eval_shape(functools.partial(init_params, model), jax.random.key(0)),
    )
    cache = jaxkv.make_cache(
        plan, max_requests=MAX_REQUESTS, mesh=mesh, axis=axis, scales=(0.5, 0.25)
    )

    def step(params, cache, upload):
        cache, logits = serve_step(model, params, cache, upload)
        return cache, jax.lax.with_sharding_constraint(logits, same)

    engine = Engine(params, plan, cache, step)
    if not by_head:  # one program is enough
        engine.shapes = engine.shapes[1:] * 2
    return engine


def everywhere(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    array = array.astype(np.float32)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def serve_demo(engine: Engine, seed: int, around: Callable[[Step], Step]) -> dict[str, Any]:
    """Serves a trace. ``around`` wraps the step; returns tokens, logits and compilations."""
    engine.step = around(engine.step)
    engine.warm_up()
    trace = make_trace(6, seed, prompt_tokens=(3, 40), new_tokens=(3, 9))
    with count_compilations() as compiled:
        report = engine.serve(trace)
    texts = [str(one) for one in compiled]
    return {"logits": report.logits, "compiled": texts, "steps": report.steps}


def tokens_of(result: dict[str, Any]) -> dict[int, list[int]]:
    return {name: rows.argmax(axis=-1).tolist() for name, rows in result["logits"].items()}


def receive(engine: Engine, shapes: Sequence[jaxkv.StepShape], mesh: Mesh) -> dict[str, Any]:
    """Runs the steps that another process packs, and notes uploads of other shapes."""
    others: list[jaxkv.StepShape] = []
    for shape in engine.shapes:  # as ``Engine.warm_up`` does
        upload = jaxkv.step.broadcast_upload(None, shapes, mesh)
        assert upload is not None and upload.shape == shape
        engine.cache, _ = engine.step(engine.params, engine.cache, upload)
    jaxkv.check_errors(engine.cache)
    steps = 0
    with count_compilations() as compiled:
        while (upload := jaxkv.step.broadcast_upload(None, shapes, mesh)) is not None:
            if upload.shape not in engine.shapes:
                others.append(upload.shape)
                continue
            engine.cache, _ = engine.step(engine.params, engine.cache, upload)
            steps += 1
        jaxkv.check_errors(engine.cache)
    return {"compiled": [str(one) for one in compiled], "steps": steps, "others": others}


def checked(mesh: Mesh, is_wrong: bool, planted: list[tuple[int, str]], run: Step) -> Step:
    """Compares uploads before each step; in some steps a process that is wrong differs first."""
    numbers: list[int] = []

    def step(params, cache, upload):
        number = int(upload.data[0])
        if number in (4, 7):
            numbers.append(number)
            try:
                jaxkv.step.check_same_upload(altered(upload, number) if is_wrong else upload, mesh)
            except RuntimeError as error:
                planted.append((number, str(error)))
        jaxkv.step.check_same_upload(upload, mesh)
        if number in (0, 9):
            cache = jaxkv.wake_up(jaxkv.sleep(cache))
        return run(params, cache, upload)

    return step


def altered(upload: jaxkv.blocks.Upload, number: int) -> jaxkv.blocks.Upload:
    """Another token id; or a step of another shape."""
    if number == 7:
        return dataclasses.replace(upload.shape, extra=upload.shape.extra + 1).idle()
    data = upload.data.copy()
    data[upload.shape.format.fields["extra"].start] += 1
    return jaxkv.blocks.Upload(data=data, shape=upload.shape)


def broadcasting(shapes: tuple[jaxkv.StepShape, ...], mesh: Mesh, run: Step) -> Step:
    def step(params, cache, upload):
        return run(params, cache, jaxkv.step.broadcast_upload(upload, shapes, mesh))

    return step
