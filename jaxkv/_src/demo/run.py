"""The command ``python -m jaxkv demo``: plan, serve, compare, and serve without zeroing."""

import argparse
import contextlib
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import get_args

import jax
from tqdm import tqdm

from jaxkv._src.demo.model import Model, Params, init_params
from jaxkv._src.demo.reference import compare
from jaxkv._src.demo.serving import MAX_TOKENS, Report, make_engine, serve
from jaxkv._src.demo.trace import Request, TraceKind, make_trace
from jaxkv._src.engine import Sampling
from jaxkv._src.hf_config import layers_from_config, load_config, model_len
from jaxkv._src.internal.checks import check_positive
from jaxkv._src.planning import Plan, plan_cache
from jaxkv._src.plotting import plot_block_use
from jaxkv._src.specs import Limits
from jaxkv._src.testing.compilations import count_compilations
from pallas_kernels import Implementation, default_implementation

CARD_BYTES = 141_000_000_000
#: keys' and values' dtype -> the largest difference between two logits that counts as rounding
BOUNDS = {"fp8_e4m3": 0.03, "fp8_e5m2": 0.06, "bf16": 0.003, "f16": 0.003, "f32": 1e-3}
BF16_QUERIES = 0.02  # instead of that for bf16 where Mosaic attends, which rounds queries as well
DEFAULT_DTYPE = "fp8_e4m3"
REQUESTS_WITHOUT_ZEROING = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, help="how many to serve (default 64)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the trace (default 0)"
    )
    parser.add_argument(
        "--kv-dtype",
        default=DEFAULT_DTYPE,
        choices=tuple(BOUNDS),
        help=f"dtype of keys and values: {', '.join(BOUNDS)} (default {DEFAULT_DTYPE})",
        metavar="DTYPE",
    )
    parser.add_argument(
        "--trace",
        default="random",
        choices=get_args(TraceKind),
        help="random: requests of their own; chat: conversations of three turns over three system "
        "prompts; rl: four answers to each prompt (default random)",
    )
    parser.add_argument(
        "--pool-bytes", type=int, default=1_500_000, help="bytes of the pool (default 1500000)"
    )
    parser.add_argument(
        "--implementation",
        choices=("xla", "mosaic_gpu"),
        help="implementation of the model's kernels (default: the best that the device runs)",
    )
    parser.add_argument(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens that attention reads at a time; divides the block size (default: all of it)",
    )
    parser.add_argument(
        "--context-parallel",
        type=int,
        default=1,
        metavar="RANKS",
        help="interleave each request's tokens among so many devices (virtual ones on a CPU); the "
        "model then has attention in all layers, because states cannot be divided (default 1)",
    )
    parser.add_argument(
        "--sleep-between-batches",
        action="store_true",
        help="send the cache to the host and back after every 8 requests",
    )
    parser.add_argument(
        "--no-zeroing", action="store_true", help="serve once, without zeroing fresh blocks"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("demo_output/occupancy.png"),
        help="file to draw the use of the pool to (default demo_output/occupancy.png)",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 when everything served equals the reference."""
    if options.requests < 1 or not 0 <= options.seed < 2**32:
        raise ValueError(
            f"--requests must be at least 1 and --seed in 0..2**32 - 1, got {options.requests} and "
            f"{options.seed}"
        )
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {options.output}: {error}") from error
    jax.config.update("jax_enable_x64", False)  # the model's own dtypes, whatever the shell says
    config = load_config("qwen3-next-demo")
    if options.context_parallel != 1:
        _find_devices(options.context_parallel)
        config |= {"full_attention_interval": 1}
    layers = layers_from_config(config, kv_dtype=options.kv_dtype)
    make_plan = functools.partial(
        plan_cache,
        layers,
        options.pool_bytes,
        max_model_len=model_len(config),
        limits=Limits(max_in_flight_tokens=MAX_TOKENS),
        context_parallel=options.context_parallel,
    )
    plan = make_plan()
    _show_large_plan()
    shape = "The same shape" if options.context_parallel == 1 else "Attention in all layers,"
    _title(f"{shape} scaled down, {options.kv_dtype} keys and values: the plan served here")
    print(plan)
    model = Model(config, tuple(layers))
    params = init_params(model, jax.random.key(options.seed))
    trace = make_trace(options.requests, options.seed, options.trace)
    shares = options.trace != "random"
    implementation = options.implementation or default_implementation()
    how = [implementation]
    if plan.context_parallel > 1:
        how.append(f"{plan.context_parallel} ranks")
    if options.kernel_block_size:
        how.append(f"kernel blocks of {options.kernel_block_size}")
    where = jax.devices()[0].device_kind
    _title(f"Serving {len(trace)} requests on {where} ({', '.join(how)})")

    def run_trace(plan: Plan, own_attention: bool) -> Report:
        engine = make_engine(
            model,
            params,
            plan,
            implementation=implementation,
            kernel_block_size=options.kernel_block_size,
            own_attention=own_attention,
        )
        kinds = {request.samples > 1 for request in trace}
        engine.warm_up(*[Sampling(temperature=float(is_drawn)) for is_drawn in kinds])
        with count_compilations() as compilations, _bar(trace, plan) as bar:
            report = serve(engine, trace, bar.update, naps=options.sleep_between_batches)
        _show_report(report, len(compilations))
        return report

    if options.no_zeroing:
        _show_nans(run_trace(make_plan(zero_policy="never"), own_attention=True))
        return 0
    own_attention = options.kernel_block_size is not None and plan.context_parallel == 1
    report = run_trace(plan, own_attention)
    agree = _compare(model, params, layers, report, bound_of(options.kv_dtype, implementation))
    figure = plot_block_use(report.uses, preemptions=report.preemptions)
    figure.savefig(options.output, dpi=130)
    print(f"{'use of blocks' if shares else 'occupancy':<17} {options.output}")
    if any(plan.groups_to_zero) and options.trace == "random":
        del trace[REQUESTS_WITHOUT_ZEROING:]
        _title(f"{len(trace)} of them without zeroing, by attention that masks logits only")
        _show_nans(run_trace(make_plan(zero_policy="never"), own_attention=True))
    return 0 if agree else 1


def bound_of(kv_dtype: str, implementation: Implementation) -> float:
    """Returns the bound for a dtype and the kernels that serve it; see `BOUNDS`."""
    if kv_dtype == "bf16" and implementation == "mosaic_gpu":
        return BF16_QUERIES
    return BOUNDS[kv_dtype]


def _find_devices(ranks: int) -> None:
    """Raises ValueError unless there are so many devices; a CPU is split into as many."""
    check_positive(context_parallel=ranks)
    with contextlib.suppress(RuntimeError):  # jax runs already, on the devices it found
        jax.config.update("jax_num_cpu_devices", ranks)
    if len(jax.devices()) < ranks:
        devices = len(jax.devices())
        raise ValueError(f"--context-parallel {ranks}: use at most {devices}, the devices here")


def _show_large_plan() -> None:
    config = load_config("qwen3-next-80b-a3b")
    _title("Qwen3-Next-80B-A3B: the cache that a 141 GB card could hold")
    print(plan_cache(layers_from_config(config), CARD_BYTES, max_model_len=model_len(config)))


def _compare(
    model: Model,
    params: Params,
    layers: Mapping[str, object],
    report: Report,
    bound: float,
) -> bool:
    count = len(report.answers)
    with tqdm(total=count, desc="without a cache", unit="request", disable=None) as bar:
        found = compare(
            model,
            params,
            layers,
            list(report.answers.values()),
            max_model_len=model_len(model.config),
            on_finish=bar.update,
        )
    agree = found.largest_difference <= bound  # never, if one is NaN
    print(
        f"without a cache   log-probabilities of {found.num_tokens:,} tokens differ by "
        f"{found.largest_difference:.2g} at most (allowed: {bound:g}); {found.num_equal:,} of "
        f"{found.num_picked:,} picks equal"
    )
    return agree


def _show_report(report: Report, compilations: int) -> None:
    steps = len(report.occupancy)
    rows = {
        "steps": f"{steps:,} in {report.seconds:.1f} s, {report.num_tokens:,} new tokens, "
        f"{report.num_tokens / report.seconds:,.0f} tokens/s; {len(report.preemptions)} "
        "preemptions",
        "compilations": f"{compilations} after warm-up",
    }
    if report.cached_tokens:
        rows["prefixes"] = (
            f"{report.cached_tokens:,} tokens were found in the cache; prompts had "
            f"{report.prompt_tokens:,}"
        )
    if report.naps:
        rows["slept"] = f"{report.naps} times, {report.bytes_released:,} bytes released in all"
    for name, text in rows.items():
        print(f"{name:<17} {text}")


def _show_nans(report: Report) -> None:
    nans = report.nan_requests
    where = f"; request {min(nans)} first" if nans else ""
    print(f"NaN logits        {len(nans):,} of {report.num_tokens:,} rows{where}")
    if nans:
        print("                  (what zeroing prevents)")


def _bar(trace: Sequence[Request], plan: Plan) -> tqdm:
    name = "paged, no zeroing" if plan.zero_policy == "never" else "paged"
    count = sum(request.samples for request in trace)
    return tqdm(total=count, desc=name, unit="request", disable=None)


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)
