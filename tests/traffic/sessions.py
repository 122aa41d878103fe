"""Random sessions of an engine: what it is asked, and whether each token is the model's."""

import contextlib
import dataclasses
import functools
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxkv
from jaxkv import Output
from jaxkv._src.engine import _calls, _drafts, _shape_buckets
from jaxkv._src.prefixes import _beginnings
from tests.traffic.models import (
    OTHERS,
    SECOND,
    Model,
    Swaps,
    forward,
    head,
    make_params,
    random_model,
)
from tests.traffic.oracle import VOCAB, candidates, make_weights

SESSIONS = 20  # of an engine, which compiles for seconds
# Where an interrupt comes: before or after a step is packed, before or after the device starts
# it, or while the host waits for it.
POINTS = ("unpacked", "packed", "unsent", "sent", "waiting")


@dataclasses.dataclass
class Story:
    """A sample as outputs have told of it.

    answers: its tokens, and the version of the weights of each. There are two where outputs do not
      say whether a sample ended before new weights, or starts again.
    mixed: versions of tokens that follow from keys and values of several weights.
    """

    prompt: list[int]
    sampling: jaxkv.Sampling
    index: int
    answers: list[tuple[list[int], list[int]]]
    mixed: set[int] = dataclasses.field(default_factory=set)
    outputs: list[Output] = dataclasses.field(default_factory=list)
    is_aborted: bool = False
    has_ended: bool = False


class Drafts:
    """Proposes the model's likeliest tokens, some of them replaced, for some samples."""

    def __init__(self, traffic: "Traffic", max_tokens: int, seed: int):
        self.max_tokens, self._traffic = max_tokens, traffic
        self._draw = random.Random(f"drafts {seed}")

    def propose(self, tokens: dict[Any, Any], max_tokens: int) -> dict[Any, list[int]]:
        layers, draw = self._traffic.model.layers, self._draw
        weights, found = make_weights(layers, self._traffic.weights), dict[Any, list[int]]()
        for name, known in tokens.items():
            ids = known.tolist()
            for _ in range(draw.randint(0, max_tokens)):
                right = int(candidates(layers, weights, ids)[0][-1])
                ids.append(draw.choice([right, right, right, draw.randrange(VOCAB)]))
            found[name] = ids[len(known) :]
        return found


class Traffic:
    """An engine under random traffic.

    history: what was called.
    seen: counts.
    """

    def __init__(
        self, seed: int, interrupts: Sequence[str], history: list[str], seen: Counter[str]
    ):
        self.draw, self.history, self.seen = random.Random(seed), history, seen
        self.more = random.Random(-1 - seed)
        self.has_swaps = self.more.random() < 0.5
        draw, of_drafts = self.draw, random.Random(f"may have drafts {seed}")
        drafts = of_drafts.choice([0, 1, 2, 3, 0])
        self.model = random_model(draw, drafts)
        self.interrupts = interrupts if draw.random() < 0.4 else ()
        self.details = random.Random(f"details {seed}")
        self.has_head, self.has_details = (self.details.random() < 0.5 for _ in range(2))
        self.options = self.random_options(self.model)
        limits = self.options["max_tokens"], self.model.plan.limits.max_in_flight_tokens
        if drafts and drafts < min(limits):
            self.has_head, _ = True, self.options.pop("reproducible", None)
            self.options |= {"drafts": Drafts(self, drafts, seed), "decode_steps": 1}
        # A step that samples, and one with limits, is compiled anew: the first request wants it.
        self.kind, self.is_new = draw.choice([0, 1, 2, 2]), True
        self.weights = 0
        is_poisoned = draw.random() < 0.5
        self.say(f"{self.model}\n{self.options}, head={self.has_head}, poisoned={is_poisoned}")
        self.engine = jaxkv.Engine(
            functools.partial(forward, self.model.layers, self.has_head),
            make_params(self.model.layers, self.weights),
            self.model.plan,
            head=head if self.has_head else None,
            logits_processors=[Swaps()] if self.has_swaps else [],
            cache=self.model.make_cache(self.options["max_requests"], is_poisoned=is_poisoned),
            **self.options,
        )
        self.stories: dict[tuple[Hashable, int], Story] = {}
        self.finished: list[list[int]] = []  # whole conversations
        self.sampled: dict[Hashable, int] = {}  # tokens, by all that they depend on
        self.most = self.model.plan.max_model_len
        self.names = 0

    def random_options(self, model: Model) -> dict[str, Any]:
        draw, plan = self.draw, model.plan
        options: dict[str, Any] = {
            "max_requests": (most := draw.choice([1, 1, 2, 3, 5, 8])),
            "max_tokens": draw.choice([most, most + 1, 16, 16, 16, 32]),
            "decode_steps": draw.choice([1, 1, 2, 3, 4]),
            "chunk_tokens": draw.choice([None, None, 1, 3]),
            "forks": draw.choice([None, None, 0, 1]),
            "shared_prefixes": draw.choice([0, 0, 1, 2]),
            "seed": draw.randrange(5),
        }
        if draw.random() < 0.5:
            size = max(layout.bytes_per_block for layout in plan.layouts)
            memory = {
                "num_bytes": size * draw.choice([2, 8, 50]),
                "min_tokens": draw.choice([1, 5]),
            }
            options["host_memory"] = jaxkv.HostMemory(**memory)
        has_states = any(group.growth.stores == "state" for group in plan.groups)
        if not has_states and draw.random() < 0.15:
            options |= {"reproducible": True, "decode_steps": 1, "shared_prefixes": 0}
        return options

    def say(self, text: str) -> None:
        self.history.append(text)

    # --- a session --------------------------------------------------------------------

    def run(self, draw: random.Random, num_requests: int) -> None:
        """Serves random requests until each has ended."""
        self.draw, steps = draw, 0
        others = [self.abort] * 3 + [self.update] * 2 + [self.sleep, self.restart]
        with self.interrupted():
            while num_requests or self.stories:
                for _ in range(min(num_requests, draw.choice([0, 0, 0, 1, 1, 4]))):
                    self.add()
                    num_requests -= 1
                if draw.random() < 0.05:
                    draw.choice(others)()
                for output in self.attempt(self.engine.step) or ():
                    self.say(f"    {output}")
                    self.take(output)
                steps += 1
                assert steps < 3000, "requests starve"
        self.check_end()
        if draw.random() < 0.3:
            self.generate()
            self.check_end()
        self.seen["sessions"] += 1

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupts calls at random, each at one of the engine's `POINTS`."""
        packer, device = self.engine._packer, self.engine._device
        self.is_calm = True

        def at(point: str) -> None:
            if point in self.interrupts and not self.is_calm and self.draw.random() < 0.03:
                self.seen[f"interrupts, {point}"] += 1
                raise KeyboardInterrupt(point)

        def around(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                at(before)
                result = function(*args)
                at(after)
                return result

            return run

        def waited(out: Any, *args: Any) -> Any:
            at("waiting")
            return np.asarray(out, *args)

        right, numpy = device.steps.copy(), SimpleNamespace(**vars(np) | {"asarray": waited})
        device.steps[:] = [around(step, "unsent", "sent") for step in right]
        pack = around(packer.pack, "unpacked", "packed")
        with mock.patch.object(packer, "pack", pack), mock.patch.object(_calls, "np", numpy):
            yield
        device.steps[:] = right

    def attempt(self, function: Callable[..., Any]) -> Any:
        """Calls a function that may be interrupted; an engine goes on after that."""
        self.is_calm = False
        try:
            return function()
        except KeyboardInterrupt as interrupt:
            self.say(f"    interrupted: {interrupt}")
            return None
        finally:
            self.is_calm = True

    # --- calls ------------------------------------------------------------------------

    def request(self) -> tuple[list[int], jaxkv.Sampling]:
        """Returns a prompt, often one that begins like others, and a sampling."""
        draw, most = self.draw, self.most
        prompt: list[int] = []
        if self.finished and draw.random() < 0.7:
            prompt = draw.choice(self.finished[-5:])
            prompt = prompt[: draw.choice([len(prompt), draw.randint(0, len(prompt))])]
        prompt = prompt[: most - 2]
        new = draw.choice([0, 1, 3, most // 3, most - 2])
        prompt = prompt + [draw.randrange(VOCAB) for _ in range(min(new, most - 2 - len(prompt)))]
        prompt = prompt or [draw.randrange(VOCAB)]
        options: dict[str, Any] = {}
        is_first, self.is_new = self.is_new, False
        if self.kind and (is_first or draw.random() < 0.5):
            limits: dict[str, Any] = {}
            if self.kind == 2 and (is_first or draw.random() < 0.5):
                limits = draw.choice([{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}])
            options = {"temperature": draw.choice([0.5, 1.0, 2.0]), "seed": draw.choice([0, 1, 2])}
            options |= {**limits, "n": 1}
            if self.options["forks"] != 0:
                options["n"] = draw.choice([1, 2, 3, 4])
        swaps = 0.7 if self.has_swaps else 0
        sampling = jaxkv.Sampling(
            max_tokens=draw.choice([1, draw.randint(1, most - len(prompt)), most - len(prompt)]),
            stop_token_ids=draw.sample(range(VOCAB), draw.choice([0, 0, 0, 1, 2, 5])),
            logprobs=draw.random() < 0.5,
            processors={Swaps: self.more.randrange(7)} if self.more.random() < swaps else None,
            **options,
        )
        has_details = self.has_details and not self.options.get("reproducible")
        if has_details and self.details.random() < 0.4:
            details = {"logprobs": self.details.choice([0, 1, 2])}
            if self.has_head:
                details["prompt_logprobs"] = self.details.choice([None, 0, 1, 2])
                details["side"] = self.details.random() < 0.5
            sampling = dataclasses.replace(sampling, **details)
        return prompt, sampling

    def add(self) -> None:
        prompt, sampling = self.request()
        salt = self.draw.choice([None] * 5 + ["a"])
        self.names += 1
        name = f"r{self.names}"
        priority = self.more.choice([-1, 0, 0, 3])
        self.say(f"add({name!r}, {prompt}, {sampling}, salt={salt!r}, priority={priority})")
        self.engine.add(name, prompt, sampling, salt=salt, priority=priority)
        self.note(name, prompt, sampling)

    def note(self, name: Hashable, prompt: list[int], sampling: jaxkv.Sampling) -> None:
        for index in range(sampling.n):
            self.stories[name, index] = Story(prompt, sampling, index, [([], [])])

    def abort(self) -> None:
        if not self.stories:
            return
        name = self.draw.choice([*self.stories])[0]
        self.say(f"abort({name!r})")
        try:
            self.engine.abort(name)
        except ValueError as error:
            assert "has ended" in str(error), error
        for (one, _), story in self.stories.items():
            story.is_aborted |= one == name

    def update(self) -> None:
        in_flight: Any = self.draw.choice(["finish", "restart", "recompute"])
        self.weights += 1
        self.say(f"update({self.weights}, in_flight={in_flight!r})")
        self.engine.update(make_params(self.model.layers, self.weights), in_flight=in_flight)
        for story in self.stories.values():
            if in_flight == "finish":
                story.mixed.add(self.weights)
            elif in_flight == "restart":
                story.answers.append(([], []))

    def sleep(self) -> None:
        level = self.draw.choice([1, 2])
        self.say(f"sleep({level}), wake_up()")
        self.engine.sleep(level)
        self.engine.wake_up()

    def restart(self) -> None:
        self.say("restart()")
        self.engine.restart()

    def generate(self) -> None:
        """Serves prompts to their ends, or to the first of these."""
        requests = [self.request() for _ in range(self.draw.randint(1, 5))]
        for name, (prompt, sampling) in enumerate(requests):
            self.say(f"generate: {name}, {prompt}, {sampling}")
            self.note(name, prompt, sampling)
        is_left, prompts, samplings = self.draw.random() < 0.3, *zip(*requests, strict=True)
        for output in self.engine.generate(prompts, samplings):
            self.say(f"    {output}")
            self.take(output)
            assert (output.request, output.sample) not in self.stories, "a part of an answer"
            if is_left:
                break
        assert is_left or not self.stories, "samples without an output"
        self.stories.clear()

    # --- checks -----------------------------------------------------------------------

    def take(self, output: Output) -> None:
        """Adds an output to its sample, whose tokens are checked at its end."""
        story = self.stories[output.request, output.sample]
        assert output.tokens or output.finish_reason, "an output that tells nothing"
        assert (output.logprobs is None) == (story.sampling.logprobs is None)
        assert len(output.version) == len(output.tokens)
        for tokens, version in story.answers:
            tokens += output.tokens
            version += output.version
        story.outputs.append(output)
        if output.finish_reason is None:
            # A sample that ended before new weights has told all since.
            story.answers = story.answers[-1:]
            return
        del self.stories[output.request, output.sample]
        faults = [self.fault(story, *answer, output.finish_reason) for answer in story.answers]
        assert "" in faults, f"{output.request!r}, {output.sample}: {faults[-1]}"
        tokens, _ = story.answers[faults.index("")]
        self.finished.append([*story.prompt, *tokens])
        self.seen["tokens"] += len(tokens)
        self.seen[output.finish_reason] += 1

    def fault(self, story: Story, tokens: list[int], version: list[int], reason: str) -> str:
        """Returns what is wrong with an answer, or ""."""
        sampling = story.sampling
        stops = [token in sampling.stop_token_ids for token in tokens]
        if any(stops[:-1]) or len(tokens) > sampling.max_tokens:
            return f"{tokens} go on after their end"
        wanted = "abort" if story.is_aborted else ""
        wanted = "length" if len(tokens) == sampling.max_tokens else wanted
        wanted = "stop" if any(stops) else wanted
        if reason != wanted:
            return f"{tokens} end with {reason!r} and not {wanted!r}"
        if version != sorted(version) or not {*version} <= {*range(self.weights + 1)}:
            return f"versions {version}"
        layers, prompt = self.model.layers, story.prompt
        ids, answers = [*prompt, *tokens], dict[int, Any]()
        for weights in {*version} - story.mixed:
            right = candidates(layers, make_weights(layers, weights), ids)
            answers[weights] = np.array(right[:2])[:, len(prompt) - 1 : -1].tolist()
        limits = sampling.top_k, sampling.top_p, sampling.min_p
        is_greedy = sampling.temperature == 0 or limits != (None, 1.0, 0.0)
        told = np.zeros(len(tokens))
        swaps = (sampling.processors or {}).get(Swaps)
        for at, (token, weights) in enumerate(zip(tokens, version, strict=True)):
            if weights in story.mixed:
                told[at] = np.nan
                continue
            first, second = (one[at] for one in answers[weights])
            likeliest = first
            if swaps is not None and Swaps().init(swaps, np.array(ids[: len(prompt) + at])) < 3:
                likeliest = second
            if token not in ((likeliest,) if is_greedy else (first, second)):
                return f"token {at} is {token} and not {first} or {second} of {tokens}"
            told[at] = SECOND * (token != first) - np.log(1 + np.exp(SECOND))
            how = sampling.seed, story.index, sampling.temperature
            place = swaps, weights, is_greedy or how, tuple(ids[: len(prompt) + at]), at
            if self.sampled.setdefault(place, token) != token:
                return f"token {at} of {tokens} is another one for the same seed"
        if sampling.logprobs is not None and tokens and len(story.answers) == 1:
            logprobs = np.concatenate([output.logprobs for output in story.outputs])[-len(told) :]
            if not np.allclose(np.where(np.isnan(told), np.nan, logprobs), told, 0, 1e-5, True):
                return f"log-probabilities {logprobs} of {tokens}"
        if {*version} == {self.weights} - story.mixed and tokens and len(story.answers) == 1:
            right = candidates(layers, make_weights(layers, self.weights), ids)
            return details_fault(story, ids, *right)
        return ""

    def check_end(self) -> None:
        """Checks that ended requests leave nothing, and that no sum was far from an integer."""
        engine = self.engine
        engine._calls.settle()
        assert not engine.has_work and not engine.manager.requests
        assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
        assert not engine.stats.nan_tokens, "sums that are no integers"


def details_fault(
    story: Story, ids: list[int], first: np.ndarray, second: np.ndarray, x: np.ndarray
) -> str:
    """Returns which detail of a sample is wrong, or ""; its last outputs tell of all ``ids``."""
    asked, num, count = story.sampling, len(story.prompt), len(ids)
    of_tokens = np.full((count - 1, VOCAB), OTHERS)
    of_tokens[np.arange(count - 1), second[:-1]] = SECOND
    of_tokens[np.arange(count - 1), first[:-1]] = 0.0
    of_tokens -= np.log(1 + np.exp(SECOND))
    right = {"of prompt": of_tokens[np.arange(count - 1), ids[1:]]}
    best = np.stack([first[:-1], second[:-1]], axis=1)
    right |= {"ids": best, "top": np.take_along_axis(of_tokens, best, 1)}
    parts: dict[str, tuple[Any, Any]] = {}
    outputs, k, of_prompt = story.outputs, asked.logprobs, asked.prompt_logprobs
    if k:
        for at, name in enumerate(("ids", "top")):
            found = np.concatenate([o.top_logprobs[at] for o in outputs])
            parts[name] = found, right[name][num - 1 :, :k]
    if of_prompt is not None:
        told = [o for o in outputs if o.prompt_logprobs is not None][-1]
        parts["of prompt"] = told.prompt_logprobs[1:], right["of prompt"][: num - 1]
        for at, name in enumerate(("ids", "top") if of_prompt else ()):
            found = told.prompt_top_logprobs[at][1:]
            parts[f"{name} of prompt"] = found, right[name][: num - 1, :of_prompt]
    if asked.side:
        found = [
            np.concatenate([o.side[at] for o in outputs if o.side is not None]) for at in range(2)
        ]
        parts |= {"side ids": (found[0], ids[:-1]), "side": (found[1], x[:-1])}
    for name, (found, wanted) in parts.items():
        size = len(wanted)  # after a restart, all is told again
        if not np.allclose(found[len(found) - size :], wanted, atol=1e-5):
            return f"{name} {found} and not {wanted}"
    return ""


def run_traffic(
    seed: int,
    sessions: Sequence[int] = range(SESSIONS),
    interrupts: Sequence[str] = POINTS,
    seen: Counter[str] | None = None,
) -> Counter[str]:
    """Serves sessions of one engine, all of which follow from the seed; returns counts.

    Args:
      interrupts: `POINTS` at which some engines are interrupted.
      seen: takes the counts, also if a fault is found.

    Raises:
      AssertionError: a fault, with the calls of its session.
    """
    seen, history = Counter() if seen is None else seen, list[str]()
    least = _shape_buckets.LEAST_SAVED_BYTES if seed % 2 else 1  # groups of samples save that much
    try:
        with (
            mock.patch.object(_shape_buckets, "LEAST_SAVED_BYTES", least),
            mock.patch.object(_beginnings, "LEAST_TOKENS", 2),
            mock.patch.object(_drafts, "FIRST", 1e6 if seed % 4 else 2.5),
        ):
            traffic = Traffic(seed, interrupts, history, seen)
            for session in sessions:
                del history[1:]
                traffic.say(f"session {session}")
                draw = random.Random(f"{seed} {session}")
                traffic.run(draw, draw.randint(1, 12))
    except Exception as error:
        calls, fault = "\n".join(history), f"{type(error).__name__}: {error}"
        raise AssertionError(f"{calls}\n\nseed {seed}: {fault}") from error
    for name in ("calls", "preemptions", "cached_tokens", "drafted_tokens", "accepted_tokens"):
        seen[name] += getattr(traffic.engine.stats, name)
    return seen


def try_traffic(
    sessions: Sequence[int], interrupts: Sequence[str], until: float, seed: int
) -> tuple[Counter[str], str]:
    """Serves sessions unless it is too late; returns counts, and the text of a fault or "".

    The text begins with the arguments of `tests.traffic` that find the fault again.
    """
    seen = Counter[str]()
    try:
        if time.time() < until:
            run_traffic(seed, sessions, interrupts, seen)
    except AssertionError as error:
        done = seen["sessions"]
        again, text = f"{done + 1} --seed {seed}", str(error)
        with contextlib.suppress(IndexError):
            try:
                run_traffic(seed, [sessions[done]], interrupts)
            except AssertionError as alone:
                again, text = f"1 --seed {seed} --session {sessions[done]}", str(alone)
        return seen, f"{again}\n{text}"
    finally:
        jax.clear_caches()  # of an engine's programs
    return seen, ""
