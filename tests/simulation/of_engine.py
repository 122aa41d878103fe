"""Random servings of an engine, whose device and model are dictionaries and hashes."""

import contextlib
import dataclasses
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import jaxkv
from jaxkv import Plan, Sampling
from jaxkv._src.engine import _engine, _states
from jaxkv._src.engine._samples import NUM_STOPS, RECORD
from jaxkv._src.engine._sampling import Kind
from jaxkv.blocks import Transfers, Upload
from jaxkv.engine import Output
from jaxkv.scheduler import Schedule
from tests.engine_models import make_plan
from tests.simulation.device import Device

VOCAB = 11
FULL, NO_LIMITS = "full", (0, float(1).hex(), float(0).hex())
Token = tuple[int, int]  # of a sequence: the weights that computed it, and its id


def drawn_token(history: Sequence[Token], draw: Hashable) -> int:
    """Returns the token after a sequence; ``draw`` is all else that it depends on."""
    return zlib.crc32(repr((tuple(history), draw)).encode()) % VOCAB


def logprob_of(history: Sequence[Token], token: int) -> float:
    """Returns a log-probability; now and then it is NaN."""
    number = zlib.crc32(repr((tuple(history), token)).encode()) % 1000
    return math.nan if number < 20 else -number / 8


def draw_of(sampling: Sampling, sample: int, position: int) -> Hashable:
    """Returns what a token depends on apart from those before it."""
    if not sampling.temperature:
        return None
    limits = sampling.top_k or 0, _hex(sampling.top_p), _hex(sampling.min_p)
    return sampling.seed, sample, position, _hex(sampling.temperature), limits


def _hex(number: float) -> str:
    return float(np.float32(number)).hex()


class Ring:
    """A ring of buffers that are never used again."""

    def buffer(self, shape: jaxkv.StepShape) -> np.ndarray:
        self._open = np.zeros(shape.format.size, np.int32)
        return self._open

    def flush(self) -> np.ndarray:
        return self._open


class ModelDevice:
    """Takes the place of an engine's device. What a block holds of a token is all up to it.

    A row whose blocks do not hold what it wrote draws ``VOCAB``, which is no token.

    chance: of an interrupt, in each call and while the host waits for one.
    """

    def __init__(self, forward: Any, params: int, cache: Device, num_sampled: int):
        self.params, self.cache, self.kind, self.vocab_size = params, cache, Kind.GREEDY, VOCAB
        self._sampled = np.zeros(num_sampled, np.int64)
        self.draw, self.chance, self.has_ring = random.Random(0), 0.0, False
        self.host_blocks = SimpleNamespace(warm_up=self._take_memory, bytes_in_flight=7)
        self.host_bytes: list[int] = []  # in each warm-up
        self.warm: set[tuple[int, jaxkv.StepShape]] = set()  # steps of a call, and their shape
        self.warm_kind: Kind | None = None
        self.seen: Counter[str] = Counter()
        self.lengths: set[int] = set()
        self.given_ring: Ring | None = None
        self.may_be_lost = self.was_waking = self.was_taken = False

    def trace(self, uploads: object) -> None: ...

    def take_over(self) -> None: ...

    def check_awake(self) -> None: ...

    def restore(self) -> None:
        """Loses all blocks, as where an interrupt comes between a call and what it returns."""
        if self.may_be_lost:
            self.cache.lose_all(self.cache.blocks)
        self.may_be_lost = False

    def _take_memory(self, cache: Device, num_bytes: int) -> Device:
        self.host_bytes.append(num_bytes)
        return cache

    def warm_up(self, calls: Sequence[Sequence[Upload]]) -> None:
        self.warm_kind = self.kind
        for uploads in calls:
            self.warm.add((len(uploads), uploads[0].shape))
            for upload in uploads:
                assert not upload.parts()["query_start_loc"].any(), "a step that is not idle"
                self._step(upload, may_have_ended=len(uploads) > 1)

    def ring(self, decode_steps: int) -> Ring | None:
        return self.given_ring

    def check_like(self, params: int) -> None: ...

    def interrupt(self) -> None:
        """Raises now and then, as a user may at any time."""
        if self.draw.random() < self.chance:
            raise KeyboardInterrupt

    def transfer(self, transfers: Transfers) -> None:
        self.interrupt()
        self.cache.transfer(transfers)

    def run(self, uploads: Sequence[Upload]) -> "Sampled":
        self.interrupt()
        self.seen["calls"] += 1
        (shape,) = {upload.shape for upload in uploads}
        assert len(uploads) == 1 or shape.max_query_len == 1, "several steps of prompts in a call"
        self.lengths |= {len(uploads)} - {1}
        assert len(self.lengths) <= 1, "calls of several lengths, each of which is compiled"
        work = [upload for upload in uploads if upload.parts()["query_start_loc"].any()]
        assert 2 * len(work) > len(uploads), "a call of which half is idle"
        is_warm = (len(uploads), shape) in self.warm
        assert is_warm or self.kind != self.warm_kind, "a call that is compiled after the warm-up"
        outs = [self._step(upload, may_have_ended=len(uploads) > 1) for upload in uploads]
        return Sampled(np.stack(outs), self)

    def _step(self, upload: Upload, *, may_have_ended: bool) -> np.ndarray:
        """Computes a step of each request, and draws for each column of the sampler's table."""
        parts, tokens = upload.parts(), upload.shape.max_tokens
        if parts["number"][0]:
            self.cache.apply(upload)
        starts, extra = parts["query_start_loc"].tolist(), parts["extra"]
        self.seen["steps"] += len(starts) > 1
        self.seen["tokens"] += starts[-1]
        self.seen["padding"] += tokens - starts[-1] if len(starts) > 1 else 0
        histories: list[list[Token] | None] = []
        for row, start, end, computed in zip(
            *(parts["request_rows"].tolist(), starts, starts[1:]),
            parts["num_computed_tokens"].tolist(),
            strict=False,
        ):
            ids = [i if i >= 0 else int(self._sampled[-1 - i]) for i in extra[start:end].tolist()]
            history = self._read(row, computed)
            # A sample that has ended within a call goes on until the host knows.
            if history is not None:
                history = None if ids[-1] < 0 else history + [(self.params, i) for i in ids]
            if not (may_have_ended and ids[-1] < 0):
                self._write(row, computed, end - start, history)
            histories.append(history)
        return self._draw(histories, extra[tokens:].view(RECORD), may_have_ended)

    def _draw(
        self, histories: list[list[Token] | None], records: np.ndarray, may_have_ended: bool
    ) -> np.ndarray:
        sampled, logprobs = np.zeros(records.size, np.int32), np.zeros(records.size, np.float32)
        kept = sampled.copy()
        for at, of in enumerate(records if histories else ()):
            history = histories[of["index"]]
            if history is None:
                sampled[at], kept[at] = VOCAB, -1 if may_have_ended else VOCAB
                continue
            draw = None
            if of["temperature"] and self.kind > Kind.GREEDY:
                limits = of["top_k"].item(), _hex(of["top_p"]), _hex(of["min_p"])
                limits = limits if self.kind == Kind.LIMITED else NO_LIMITS
                numbers = [of[name].item() for name in ("seed", "sample", "position")]
                draw = *numbers, _hex(of["temperature"]), limits
            sampled[at] = kept[at] = token = drawn_token(history, draw)
            logprobs[at] = logprob_of(history, token)
            if may_have_ended and token in of["stops"]:
                kept[at] = -1
        place = int(records["place"][0])
        assert place + kept.size <= self._sampled.size, "tokens that the device does not keep"
        self._sampled[place : place + kept.size] = kept
        return np.concatenate([sampled, logprobs.view(np.int32), np.zeros(1, np.int32)])

    def _read(self, row: int, computed: int) -> list[Token] | None:
        """Returns the tokens of a row; None if what it sees of these is not what it wrote."""
        history: Sequence[Token] = ()
        for group in self.cache.groups if computed else ():
            oldest = group.oldest_visible(computed)
            cells = [self._cell(group, row, position) for position in range(oldest, computed)]
            history = cells[-1] or ()
            wanted = [tuple(history[: position + 1]) for position in range(oldest, computed)]
            if cells != wanted or len(history) != computed:
                return None
        return list(history)

    def _cell(self, group: Any, row: int, position: int) -> tuple[Token, ...] | None:
        column, place = divmod(position, group.block)
        block = self.cache.block(row, group.index, column)
        return self.cache.blocks.get(block, {}).get(place)  # type: ignore

    def _write(self, row: int, computed: int, count: int, history: list[Token] | None) -> None:
        for group in self.cache.groups:
            for position in range(computed, computed + count):
                column, place = divmod(position, group.block)
                block = self.cache.block(row, group.index, column)
                assert block, "tokens are written to the null block"
                cell: Any = None if history is None else tuple(history[: position + 1])
                self.cache.blocks.setdefault(block, {})[place] = cell


class Sampled:
    """Numbers that a call draws; waiting for them may be interrupted."""

    def __init__(self, out: np.ndarray, device: ModelDevice):
        self._out, self._device, self._number = out, device, device.seen["calls"]

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        self._device.interrupt()
        self._device.seen["idle waits"] += self._device.seen["calls"] == self._number
        return self._out


@dataclasses.dataclass
class Told:
    """A sample as outputs have told of it.

    weights: with which its tokens are computed; None: with several.
    """

    prompt: list[int]
    sampling: Sampling
    index: int
    weights: int | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    is_aborted: bool = False
    reason: str | None = None

    def check(self, output: Output) -> int:
        """Checks an output, and notes its tokens; returns how many are NaN."""
        logprobs: list[float] = []
        for token in output.tokens:
            assert self.reason is None, "a token after the end"
            if self.weights is not None:
                history = [(self.weights, i) for i in (*self.prompt, *self.tokens)]
                wanted = drawn_token(history, draw_of(self.sampling, self.index, len(self.tokens)))
                assert token == wanted, f"token {len(self.tokens)} is {token} and not {wanted}"
                logprobs.append(logprob_of(history, token))
            self.tokens.append(token)
            if token in self.sampling.stop_token_ids:
                self.reason = "stop"
            elif len(self.tokens) == self.sampling.max_tokens:
                self.reason = "length"
        if self.reason is None and self.is_aborted:
            self.reason = "abort"
        assert output.finish_reason == self.reason, f"{output.finish_reason}, not {self.reason}"
        assert output.tokens or self.reason, "an output that tells nothing"
        if not self.sampling.logprobs or self.weights is not None:
            told = logprobs if self.sampling.logprobs else None
            assert str(output.logprobs) == str(told), "log-probabilities"
        return sum(map(math.isnan, logprobs))


class EngineServing:
    """An engine that serves random requests, between calls of all kinds."""

    def __init__(self, seed: int, history: list[str]):
        self.draw, self.history = random.Random(seed), history
        draw, plan = self.draw, make_plan((FULL, "window"), self.draw.choice([20, 21, 30, 80]))
        self.options: dict[str, Any] = {
            "max_requests": draw.choice([1, 2, 3, 4, 10]),
            "max_tokens": draw.choice([10, 16]),
            "decode_steps": draw.choice([1, 2, 3]),
            "chunk_tokens": draw.choice([None, None, 3]),
            "forks": draw.choice([None, None, 0, 1, 1]),
            "host_memory": self._host_memory(plan) if draw.random() < 0.5 else None,
        }
        if self.options["decode_steps"] == 1 and draw.random() < 0.2:
            self.options["reproducible"] = True
        with (
            mock.patch.object(_engine, "Device", ModelDevice),
            mock.patch.object(_engine, "make_cache", Device),
        ):
            self.engine = jaxkv.Engine(print, 0, plan, **self.options)
        self.device: Any = self.engine._device
        self.note_schedules()
        self.note_resets()
        if draw.random() < 0.5:
            self.engine._packer.ring = self.device.given_ring = Ring()  # type: ignore
        self.device.draw, self.device.chance = draw, draw.choice([0, 0, 0.1])
        self.told: dict[tuple[Hashable, int], list[Told]] = {}  # in the order of their ends
        self.counts: Counter[str] = Counter()
        self.is_exact = True  # whether nothing was computed or told in vain
        self.roots = [[draw.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
        self.say(f"{self.options}, {plan.num_blocks} blocks")

    def _host_memory(self, plan: Plan) -> jaxkv.HostMemory:
        size = max(layout.bytes_per_block for layout in plan.layouts)
        return jaxkv.HostMemory(num_bytes=size * self.draw.choice([3, 20, 200]), min_tokens=1)

    def note_schedules(self) -> None:
        """Counts what happens to requests in the schedules that are packed."""
        packer, pack = self.engine._packer, self.engine._packer._pack

        def counted(schedule: Schedule, shape: jaxkv.StepShape) -> Any:
            step, hits = pack(schedule, shape), schedule.hits.values()
            self.counts["preemptions"] += len(schedule.preempted)
            self.counts["cached tokens"] += sum(hit.num_cached_tokens for hit in hits)
            self.counts["steps that preempt two"] += len(schedule.preempted) > 1
            return step

        packer._pack = counted  # type: ignore

    def note_resets(self) -> None:
        """Tells the cache of resets of the manager, after which uploads have any number."""
        cache, reset = self.device.cache, self.engine.manager.reset

        def noted() -> None:
            reset()
            cache.goes_on_anew = True

        self.engine.manager.reset = noted  # type: ignore

    def say(self, text: str) -> None:
        self.history.append(text)

    def run(self, num_requests: int) -> Counter[str]:
        """Serves random requests until each has ended."""
        calls: list[Callable[[], object]] = [self.abort] * 6 + [
            self.update,
            self.sleep,
            self.warm_up,
        ]
        while num_requests or self.engine.has_work:
            if num_requests and self.draw.random() < 0.4:
                self.add()
                num_requests -= 1
            if self.draw.random() < 0.1:
                self.draw.choice([*calls, self.restart])()
            self.step()
        self.device.chance = 0
        self.check_end()
        self.generate()
        self.check_end()
        return self.counts + self.device.seen

    # --- calls ------------------------------------------------------------------------

    def request(self) -> tuple[list[int], Sampling]:
        """Returns a prompt that begins like others, and a sampling."""
        draw = self.draw
        prompt = draw.choice(self.roots)[: draw.choice([0, draw.randint(0, 20)])]
        prompt = [*prompt, *(draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 5])))]
        limits = draw.choice([{}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.25}])
        sampled = {"temperature": draw.choice([0.5, 1.0]), "seed": draw.randrange(2**32), **limits}
        if self.options["forks"] != 0:
            sampled["n"] = draw.choice([1, 2, 3, 9])
        sampling = Sampling(
            max_tokens=draw.randint(1, 20),
            stop_token_ids=draw.sample(range(VOCAB), draw.choice([0, 0, 1, 2, NUM_STOPS + 1])),
            logprobs=draw.random() < 0.5,
            **(sampled if draw.random() < 0.5 else {}),
        )
        return prompt or [1], sampling

    def add(self) -> None:
        name, samples = self.draw.choice([*range(3), "a", ("a", 1)]), self.engine._samples
        prompt, sampling = self.request()
        names = {name, *((name, index) for index in range(1, sampling.n))}
        is_taken = bool(names & (samples.tokens.keys() | samples.of_request.keys()))
        self.say(f"add({name!r}, {prompt}, {sampling})")
        try:
            self.engine.add(name, prompt, sampling)
        except ValueError:
            assert is_taken, "a name that is free is refused"
        else:
            assert not is_taken, "a name in use is taken"
            self.note(name, prompt, sampling)

    def note(self, name: Hashable, prompt: list[int], sampling: Sampling) -> None:
        self.counts["prompt tokens"] += len(prompt)
        for index in range(sampling.n):
            new = Told(prompt, sampling, index, self.device.params)
            self.told.setdefault((name, index), []).append(new)

    def alive(self) -> list[Told]:
        """Returns the samples that have not ended; outputs may still have to tell of others."""
        samples = filter(None, self.engine._samples.by_index)
        return [self.told[sample.request, sample.number][-1] for sample in samples]

    def abort(self) -> None:
        if self.engine._samples.of_request:
            name = self.draw.choice([*self.engine._samples.of_request])
            self.say(f"abort({name!r})")
            for sample in self.engine._samples.of_request[name]:
                self.told[name, sample.number][-1].is_aborted = True
            self.engine.abort(name)
            assert name not in self.engine._samples.of_request, "samples of it go on"

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        chance, self.device.chance = self.device.chance, 0
        yield
        self.device.chance = chance

    def update(self) -> None:
        in_flight: Any = self.draw.choice(["finish", "restart"])
        self.say(f"update({self.device.params + 1}, {in_flight!r})")
        with self.undisturbed():
            self.engine.update(self.device.params + 1, in_flight=in_flight)
        for told in self.alive():
            told.weights = None
            if in_flight == "restart":
                told.weights = self.device.params
                told.tokens.clear()
        self.is_exact = False

    def sleep(self) -> None:
        level, cache = self.draw.choice([1, 2]), self.device.cache
        self.say(f"sleep({level})")

        def asleep(cache: Device, level: int) -> Any:
            if level == 2:
                cache.lose_all(cache.blocks)
            return SimpleNamespace(released_bytes=1)

        with (
            self.undisturbed(),
            mock.patch.object(_states, "sleep", asleep),
            mock.patch.object(_states, "wake_up", lambda asleep: cache),
        ):
            assert self.engine.sleep(level) == 1
            self.engine.wake_up()

    def warm_up(self) -> None:
        self.say("warm_up()")
        before = self.device.kind
        with self.undisturbed():
            self.engine.warm_up()
            assert self.device.kind == before, "a sampler that no request wants"
            self.engine.warm_up(*(told.sampling for told in self.alive()))
        memory = self.options["host_memory"]
        wanted = [] if memory is None else [self.engine.manager.offload_stats().num_bytes] * 2
        assert self.device.host_bytes[-2:] == wanted, "host memory that is not taken before"

    def restart(self) -> None:
        self.say("restart()")
        self.device.cache.lose_all(self.device.cache.blocks)
        self.engine.restart()
        self.is_exact = False

    def step(self) -> None:
        self.counts["host steps"] += 1
        assert self.counts["host steps"] < 3000, "requests starve"
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            self.say("    interrupted")
            self.is_exact = False
            return
        in_flight = self.engine._calls.in_flight
        assert len(in_flight) < 2 or self.device.chance, "a call before the newest is in flight"
        for output in outputs:
            self.say(f"    {output}")
            self.check(self.told[output.request, output.sample], output)

    def check(self, queue: list[Told], output: Output) -> None:
        self.counts["sampled tokens"] += len(output.tokens)
        self.counts["nan tokens"] += queue[0].check(output)
        if queue[0].reason is not None:
            del queue[0]

    def generate(self) -> None:
        """Serves prompts to their ends, or to the first of these."""
        prompts, samplings = zip(*(self.request() for _ in range(4)), strict=True)
        self.say(f"generate({prompts}, {samplings})")
        for name, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            self.note(name, prompt, sampling)
        leaves = self.draw.random() < 0.3
        for output in self.engine.generate(prompts, samplings):
            self.check(self.told[output.request, output.sample], output)
            assert not self.told[output.request, output.sample], "a part of an answer"
            if leaves:
                self.told.clear()
                self.is_exact = False
                break

    def check_end(self) -> None:
        """Checks that nothing is left of requests that have ended, and what was counted."""
        engine, samples, seen = self.engine, self.engine._samples, self.device.seen
        engine._calls.settle()
        assert not any(self.told.values()), "samples that no output has told of"
        assert not engine.has_work and not engine.manager.requests
        assert engine.manager.num_free_blocks == engine.manager.plan.usable_blocks
        assert not samples.tokens and not samples.of_request
        assert not any(samples.by_index)
        stats = engine.stats
        assert stats.prompt_tokens == self.counts["prompt tokens"]
        assert stats.preemptions == self.counts["preemptions"]
        assert stats.cached_tokens == self.counts["cached tokens"]
        assert engine.bytes_in_flight == self.device.host_blocks.bytes_in_flight
        if self.is_exact:
            assert (stats.calls, stats.steps) == (seen["calls"], seen["steps"])
            assert stats.computed_tokens == seen["tokens"]
            assert stats.padded_tokens == seen["padding"]
            assert stats.sampled_tokens == self.counts["sampled tokens"]
            assert stats.nan_tokens == self.counts["nan tokens"]


def run_engine(seed: int) -> Counter[str]:
    """Serves the requests of a seed.

    Raises:
      AssertionError: a fault, with the calls that led to it.
    """
    history: list[str] = []
    try:
        return EngineServing(seed, history).run(random.Random(seed).randint(3, 16))
    except Exception as error:
        calls, fault = "\n".join(history), f"{type(error).__name__}: {error}"
        raise AssertionError(f"{calls}\n\nserving {seed}: {fault}") from error
