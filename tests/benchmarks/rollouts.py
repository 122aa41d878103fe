"""RL rollouts: groups of samples of one prompt, with and without shared prefixes.

The demo's model over one pool that just fits all samples if groups share their prompts.
Without sharing, fewer samples run at once, and each computes the prompt by itself.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.demo.model import Model, Params, init_params, query_dtype
from tests.benchmarks.timing import Report, by_size
from tests.hosts.engine import serve_step

Sample = tuple[int, int]  # group, and number in it


class Sizes(NamedTuple):
    """Groups of samples, and tokens of a prompt, of an answer and of a chunk of a prompt."""

    groups: int
    samples: int
    prompt: int
    answer: int
    chunk: int

    @property
    def max_requests(self) -> int:
        return self.groups * self.samples

    @property
    def max_model_len(self) -> int:
        return self.prompt + self.answer


@dataclasses.dataclass
class Course:
    """Steps and seconds of a run, apart for steps with prompts and steps that only decode.

    most_running: requests that ran at once.
    """

    prompt_steps: int = 0
    prompt_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    most_running: int = 0
    preemptions: int = 0

    @property
    def seconds(self) -> float:
        return self.prompt_seconds + self.decode_seconds


Step = Callable[[Params, jaxkv.KVCache, jaxkv.blocks.Upload], tuple[jaxkv.KVCache, jax.Array]]


class Rollout:
    """One run over a plan: a scheduler, its manager, a cache and the tokens of all samples."""

    def __init__(self, sizes: Sizes, plan: jaxkv.Plan, params: Params, step: Step, shares: bool):
        self.sizes, self.params, self.run_step, self.shares = sizes, params, step, shares
        self.manager = jaxkv.BlockManager(plan, max_requests=sizes.max_requests)
        self.cache = jaxkv.make_cache(plan, max_requests=sizes.max_requests)
        self.tokens: dict[Sample, list[int]] = {}
        self.scheduler = jaxkv.Scheduler(
            self.manager,
            max_tokens=sizes.chunk,
            forks=sizes.samples if shares else 0,
            tokens=self.tokens if shares else None,
        )
        self.decode, self.mixed = (
            self.scheduler.shape(
                max_tokens=tokens,
                max_query_len=longest,
                extra=tokens,
                shared_prefixes=sizes.groups if shares and longest == 1 else 0,
            )
            for tokens, longest in ((sizes.max_requests, 1), (sizes.chunk, sizes.chunk))
        )
        for shape in (self.decode, self.mixed):
            self.cache, _ = step(params, self.cache, shape.idle())
        jax.block_until_ready(self.cache)
        self.course = Course()

    def add(self, group: int, prompt: list[int]) -> None:
        """Queues the samples of a group, or if they share only the first, which is forked later."""
        for number in range(1 if self.shares else self.sizes.samples):
            self.tokens[group, number] = [*prompt]
            self.scheduler.add((group, number), len(prompt), max_tokens=self.sizes.max_model_len)

    def serve(self) -> Course:
        """Runs until all samples have their answers."""
        while self.scheduler.has_work:
            started = time.perf_counter()
            decodes = self.step()
            seconds = time.perf_counter() - started
            if decodes:
                self.course.decode_steps += 1
                self.course.decode_seconds += seconds
            else:
                self.course.prompt_steps += 1
                self.course.prompt_seconds += seconds
        jaxkv.check_errors(self.cache)
        return self.course

    def step(self) -> bool:
        """Runs one step. Returns whether all requests decoded."""
        schedule = self.scheduler.schedule()
        self.course.preemptions += len(schedule.preempted)
        decodes = max(schedule.work.values()) == 1
        ids: list[int] = []
        for name, count in schedule.work.items():
            done = self.manager.num_computed_tokens(name)
            ids += self.tokens[name][done : done + count]
        shape = self.decode if decodes else self.mixed
        upload = self.manager.step(shape, schedule.work, extra=ids)
        self.cache, out = self.run_step(self.params, self.cache, upload)
        picked = np.asarray(out)
        for name, index in schedule.samples.items():
            if self.shares and name[1] == 0 and len(self.tokens[name]) == self.sizes.prompt:
                self._fork(name, int(picked[index]))
            self._pick(name, int(picked[index]))
        self.course.most_running = max(self.course.most_running, len(self.scheduler.running))
        return decodes

    def _fork(self, donor: Sample, token: int) -> None:
        samples = [(donor[0], number) for number in range(1, self.sizes.samples)]
        for sample in samples:
            self.tokens[sample] = [*self.tokens[donor]]
        self.scheduler.fork(donor, samples)
        for sample in samples:
            self._pick(sample, token)

    def _pick(self, name: Sample, token: int) -> None:
        """Appends the likeliest token; each sample of a group begins with a different one."""
        tokens = self.tokens[name]
        is_first = len(tokens) == self.sizes.prompt
        tokens.append((token + name[1]) % 256 if is_first else token)
        if len(tokens) < self.sizes.max_model_len:
            self.scheduler.append({name: 1})
        else:
            self.scheduler.finish(name)
            del self.tokens[name]


def run(report: Report) -> None:
    sizes = by_size(
        full=Sizes(groups=2, samples=8, prompt=8192, answer=1024, chunk=512),
        small=Sizes(groups=2, samples=8, prompt=512, answer=64, chunk=64),
        smallest=Sizes(groups=1, samples=3, prompt=40, answer=6, chunk=16),
    )
    report.title(
        f"The demo's model, {sizes.groups} groups of {sizes.samples} samples: prompts of "
        f"{sizes.prompt:,} tokens, answers of {sizes.answer:,}"
    )
    model, params, plan = _model(sizes)

    @jax.jit(donate_argnums=1)
    def step(params, cache, upload):
        cache, logits = serve_step(model, params, cache, upload)
        return cache, jnp.argmax(logits, axis=-1)

    speeds: dict[str, float] = {}
    for shares in (True, False):
        rollout = Rollout(sizes, plan, params, step, shares)
        rng = np.random.default_rng(0)
        for group in range(sizes.groups):
            rollout.add(group, rng.integers(0, 256, sizes.prompt).tolist())
        course, name = rollout.serve(), "shared" if shares else "not shared"
        tokens = sizes.max_requests * sizes.answer
        speeds[name] = tokens / course.seconds
        report.note(
            f"{name:<11} {speeds[name]:8,.1f} tokens/s; prompts {course.prompt_seconds:.2f} s in "
            f"{course.prompt_steps:,} steps, decodes {course.decode_seconds:.2f} s in "
            f"{course.decode_steps:,}; up to {course.most_running} at once, "
            f"{course.preemptions} preemptions; {plan.usable_blocks:,} blocks",
            tokens_per_s=speeds[name],
            **dataclasses.asdict(course),
        )
    ratio = speeds["shared"] / speeds["not shared"]
    report.note(f"sharing generates {ratio:.2f} times as fast", ratio=ratio)


def _model(sizes: Sizes) -> tuple[Model, Params, jaxkv.Plan]:
    """Returns the model, its weights, and a plan whose pool holds all groups that share."""
    config: dict[str, Any] = {
        **jaxkv.load_config("qwen3-next-demo"),
        "max_position_embeddings": sizes.max_model_len,
    }
    if sizes.samples < 8:  # to compile sooner
        config |= {"num_hidden_layers": 1, "full_attention_interval": 1}
    layers = jaxkv.layers_from_config(config, kv_dtype="bf16")
    limits = jaxkv.Limits(max_in_flight_tokens=sizes.chunk)
    plan_of = {"max_model_len": sizes.max_model_len, "limits": limits}
    plan = jaxkv.plan_cache(layers, 2**40, num_blocks_override=2**16, **plan_of)
    prompt, whole = plan.steady_blocks(sizes.prompt), plan.steady_blocks(sizes.max_model_len)
    states = plan.steady_blocks(1) - 1  # of a request; each sample writes its own
    group = prompt + sizes.samples * (whole - prompt + states + 1)
    blocks = max(sizes.groups * group, whole) + 2 * states + 2
    plan = jaxkv.plan_cache(layers, 2**40, num_blocks_override=blocks, **plan_of)
    model = Model(config, tuple(layers), query_dtype("bf16"))
    return model, init_params(model, jax.random.key(0)), plan
