"""Changes of an engine's state between its steps: weights, sleep and compilation."""

from typing import Literal, get_args

from jaxkv._src.engine._calls import Calls
from jaxkv._src.engine._device import Uploads
from jaxkv._src.engine._outputs import PROMPT
from jaxkv._src.engine._placement import placed_like
from jaxkv._src.engine._sampling import Sampling
from jaxkv._src.internal.checks import check_choice
from jaxkv._src.internal.log import LOGGER
from jaxkv._src.sleeping import sleep, wake_up

InFlight = Literal["finish", "restart", "recompute"]


def set_params(calls: Calls, params: object, in_flight: InFlight) -> None:
    """Takes new weights; see `Engine.update`."""
    check_choice(get_args(InFlight), in_flight=in_flight)
    calls.device.check_like(params)
    params = placed_like(calls.device.plain(params), calls.device.params)
    calls.settle()
    samples, calls.is_broken = calls.packer.samples, True
    calls.starts_over = in_flight == "restart"
    calls.device.params, samples.version = params, samples.version + 1
    LOGGER.info("new weights, version %d; in flight: %s", samples.version, in_flight)
    if in_flight == "finish":
        samples.note_version()
        calls.packer.manager.new_epoch()
        calls.is_broken = False
    else:
        calls.rebuild()


def fall_asleep(calls: Calls, level: int) -> int:
    """Gives the cache's memory back, and returns the bytes; see `Engine.sleep`."""
    device = calls.device
    calls.settle()
    device.restore()
    device.check_awake()
    calls.is_broken = True
    try:
        device.cache = asleep = sleep(device.cache, level=level)
    except Exception:  # the cache is as it was
        calls.is_broken = False
        raise
    if level == 2:
        calls.rebuild()
    calls.is_broken = False
    LOGGER.info("sleeps at level %d, %s bytes are free", level, f"{asleep.released_bytes:,}")
    return asleep.released_bytes


def awake(calls: Calls) -> None:
    """Takes the cache's memory again; see `Engine.wake_up`."""
    device = calls.device
    calls.mend()
    was_waking = device.was_waking
    device.restore()
    if was_waking:  # the call that was interrupted has done it
        return
    calls.is_broken = True
    try:
        device.cache = wake_up(device.cache)
    except Exception:  # it sleeps as before
        calls.is_broken = False
        raise
    calls.is_broken = False
    LOGGER.info("is awake")


def warm_up(calls: Calls, samplings: tuple[Sampling, ...]) -> None:
    """Compiles all steps; see `Engine.warm_up`."""
    device, buckets = calls.device, calls.packer.buckets
    for sampling in samplings:
        calls.packer.samples.model.check(sampling)
    calls.settle()
    device.check_awake()
    device.restore()
    calls.is_broken = True
    ring, most = calls.packer.ring, calls.decode_steps
    for sampling in samplings:
        device.options |= sampling.step_options
    calls_of: list[tuple[Uploads, int]] = []
    for wants in device.options.variants():
        shapes = buckets.mixed.values() if wants & PROMPT else buckets.shapes
        calls_of += [((shape.idle(ring),), wants) for shape in shapes]
        if most > 1 and not wants & PROMPT:
            several = [
                tuple([one.idle(ring) for _ in range(most)])
                for one in [*buckets.decode.values(), *buckets.shared.values()]
            ]
            calls_of += [(uploads, wants) for uploads in several]
    device.warm_up(calls_of)
    if (stats := calls.packer.manager.offload_stats()) is not None:
        device.cache = device.host_blocks.warm_up(device.cache, stats.num_bytes)
    calls.is_broken = False
