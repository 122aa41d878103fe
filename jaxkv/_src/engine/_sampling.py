"""`Sampling`, what a request asks for. No jax."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

from jaxkv._src.engine._other_names import OF_SAMPLING
from jaxkv._src.engine._outputs import PROMPT, SIDE, TOP, Kind, StepOptions
from jaxkv._src.internal.checks import (
    check_count,
    check_flag,
    check_int,
    check_kind,
    check_number,
    make_ints_plain,
)
from jaxkv._src.internal.misnamed import knows_remedies
from jaxkv._src.internal.numbers import INT32_MAX, MAX_SAMPLES
from jaxkv._src.prefixes import as_tokens

MOST = {"n": MAX_SAMPLES, "top_k": INT32_MAX, "max_tokens": INT32_MAX, "seed": 2**32 - 1}
SMALLEST, LARGEST = 1e-30, 1e30  # numbers by which the device divides logits in f32
# The golden ratio in 32 bits, an odd number: seeds that many prompts and small seeds give differ.
SEED_STEP = 0x9E3779B1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling of one request.

    A sample's tokens depend on its seed, its number and their positions, never on the requests
    next to it: preemption and the order of requests change nothing.

    temperature: divides the logits; 0: the most likely token, whatever ``seed``, ``top_k``,
      ``top_p`` and ``min_p``.
    top_k: samples from the ``top_k`` most likely tokens; None: from all. Of equally likely ones the
      smallest ids come first.
    top_p: of these keeps the fewest most likely ones that together reach this probability.
    min_p: of these drops tokens less likely than ``min_p`` times the most likely one.
    seed: of the request's random numbers, 0 to 2**32 - 1; None: the engine chooses one. Requests of
      one seed get the same random numbers, except the prompts of `Engine.generate` with one
      Sampling for all: each gets its own, the same ones every time.
    n: samples of the prompt, which is computed once.
    max_tokens: tokens of each sample at most; None: up to the plan's ``max_model_len``.
    stop_token_ids: tokens that end a sample; the last of its tokens is then one of these.
    logprobs: of each token, in `Output.logprobs`: those of the model, before temperature and the
      rest. True or 0: of the tokens alone; k: also of the k most likely ones, in
      `Output.top_logprobs`; None or False: none.
    prompt_logprobs: the same of the prompt's tokens, in `Output.prompt_logprobs` and
      `Output.prompt_top_logprobs`. They need `Engine(head=)`.
    side: whether outputs hold the side outputs of ``forward``. Requests with these, or with
      ``prompt_logprobs``, compute their prompt, once for all samples, and share no cached prefix
      with other requests.
    processors: data for the engine's logits processors, by their classes; see
      `jaxkv.logits_processors`. Those that are not named leave the request alone.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    side: bool = False
    processors: Mapping[type, object] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        make_ints_plain(self)
        for name, most in MOST.items():
            number, least = getattr(self, name), 0 if name == "seed" else 1
            if number is None and name != "n":
                continue
            check_int(**{name: number})
            if not least <= number <= most:
                remedy = "; None means no limit" if name in ("top_k", "max_tokens") else ""
                raise ValueError(f"{name}={number} must be in {least}..{most}{remedy}")
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if isinstance(number, bool) or number is None:
                object.__setattr__(self, name, 0 if number else None)
            else:
                check_count(**{name: number})
        check_flag(side=self.side)
        if self.processors is not None:
            check_kind(Mapping, "a mapping from classes to data", processors=self.processors)
            for kind in self.processors:
                check_kind(type, "a mapping from classes to data, not from others", processors=kind)
        check_number(temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        if self.temperature != 0 and not SMALLEST <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature={self.temperature} must be 0, for the most likely token, or from "
                f"{SMALLEST} to {LARGEST}; 1.0 samples as the model says"
            )
        if not SMALLEST <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be from {SMALLEST} to 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be from 0 to 1")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} samples at temperature=0 are all the same; set a temperature, or n=1"
            )
        stops = self.stop_token_ids
        stops = as_tokens("stop_token_ids", list(stops) if isinstance(stops, Set) else stops)
        object.__setattr__(self, "stop_token_ids", tuple(stops.tolist()))

    def of_prompts(self, count: int) -> Iterator["Sampling"]:
        """Yields the sampling of each prompt, with a seed of its own if this has one."""
        for index in range(count):
            seed = None if self.seed is None else (self.seed + index * SEED_STEP) % 2**32
            yield dataclasses.replace(self, seed=seed)

    @property
    def step_options(self) -> StepOptions:
        """The computations of steps for this."""
        has_limits = self.top_k is not None or self.top_p < 1 or self.min_p > 0
        kind = Kind.LIMITED if has_limits else Kind.SAMPLED
        of_prompt = -1 if self.prompt_logprobs is None else self.prompt_logprobs
        return StepOptions(
            kind if self.temperature else Kind.GREEDY, self.logprobs or 0, of_prompt, self.side
        )

    @property
    def asks(self) -> int:
        """Bits of the details that this asks for, see `StepOptions.at`."""
        of_prompt = PROMPT if self.prompt_logprobs is not None else 0
        return (TOP if self.logprobs else 0) | (SIDE if self.side else 0) | of_prompt


type.__setattr__(Sampling, "__init__", knows_remedies(OF_SAMPLING)(Sampling.__init__))
