"""Simulations of a manager whose kept blocks go to host memory, and come back often."""

import random
from collections import Counter
from collections.abc import Hashable

from jaxkv import HostMemory, Plan
from jaxkv._src.offload._manager import LOOKAHEAD_BYTES
from tests.simulation.of_manager import ManagerSimulation
from tests.simulation.of_scheduler import SchedulerSimulation
from tests.simulation.oracle import Known
from tests.simulation.plans import KINDS, random_plan
from tests.simulation.prefixes import Prompt
from tests.simulation.traffic import Simulation

STORED = [kind for kind in KINDS if kind != "cross"]


class Tight(Simulation):
    """A pool that holds hardly one request, next to host memory."""

    def random_plan(self) -> Plan:
        return random_plan(self.draw, self.kind, room=(1, 1.2, 1.5, 2))

    def host_memory(self, seed: int) -> HostMemory:
        size = max(layout.bytes_per_block for layout in self.plan.layouts)
        blocks = self.draw.choice([1.5, 4, self.plan.num_blocks, 3 * self.plan.num_blocks])
        return HostMemory(num_bytes=int(size * blocks), min_tokens=self.draw.choice([1, 1, 1, 8]))

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        super().__init__(
            seed, random.Random(seed).choice(STORED) if kind is None else kind, history
        )
        self.manager._offload.lookahead_bytes = random.Random(-seed).choice([1, LOOKAHEAD_BYTES])


class OffloadSchedulerSimulation(Tight, SchedulerSimulation):
    """An engine whose requests preempt each other all the time."""


class OffloadSimulation(Tight, ManagerSimulation):
    """Requests of few prompts in a pool that holds hardly one of them."""

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        super().__init__(seed, kind, history)
        self.chosen: dict[Hashable, int] | None = None
        # And what `self.prefixes.prompts` and `RequestState.lost_ends` had.
        self.swapped: dict[Hashable, tuple[Known, Prompt | None, list[int]]] = {}
        self.roots = [[self._id() for _ in range(48)] for _ in range(self.draw.choice([2, 3, 5]))]

    def prompt(self) -> list[int]:
        root = self.draw.choice(self.roots)
        tokens = root[: self.draw.choice([24, 40, 48, self.draw.randint(1, 48)])]
        tokens += [self._id() for _ in range(self.draw.choice([0, 0, 1, 5]))]
        return tokens[: self.plan.max_model_len - self.draw.randint(0, 3)]

    def run(self, num_calls: int) -> Counter[str]:
        """Serves prompts one by one between random calls, then empties host memory."""
        for _ in range(num_calls // 10):
            for _ in range(self.draw.randint(1, 6)):
                self.serve()
            super().run(self.draw.randint(0, 12))
        self.new_epoch()
        self.oracle.step(self.manager.step(self.shape, {}), self.requests, {})  # the moves
        room = self.manager._offload.pool
        assert not self.oracle.device.host and not room.used_bytes, "host memory leaks"
        assert not room.num_used_ids, "host ids leak"
        left = {name: of for name, of in vars(room).items() if isinstance(of, dict) and of}
        assert not left, f"host memory remembers chunks: {left}"
        return self.oracle.seen

    def start(self) -> None:
        if self.swapped and self.chance(0.5):
            return self.resume()
        super().start()
        self.swapped.pop([*self.requests][-1], None)  # a new request of its name

    def end(self, name: Hashable) -> None:
        if not self.chance(0.3):
            return super().end(name)
        request, prompt, more = self.requests[name], self.prefixes.prompts[name], None
        if prompt is not None and self.chance(0.7):
            more = request.tokens[len(prompt.codes) : request.computed]
        self.say(f"park({name!r}, {more})")
        lost_ends = self.lost_ends(name)
        prompt = self.prefixes.finish(name, more)
        is_swapped_out = self.manager.swap_out(name, more)
        self.say(f"    {is_swapped_out}")
        del self.requests[name]
        if is_swapped_out:
            self.swapped[name] = request, prompt, lost_ends
            self.oracle.seen["parked"] += 1
            self.oracle.is_fresh_epoch = False  # requests of any epoch may be parked

    def resume(self) -> None:
        name = self.draw.choice([*self.swapped])
        request, prompt, lost_ends = self.swapped.pop(name)
        count = self.manager.num_swapped_tokens(name)
        self.say(f"resume({name!r}): {count}")
        if not count or self.chance(0.1):
            self.manager.discard_swapped(name)
            return
        assert count == request.computed
        blocks = self.manager._prefixes.loads.swapped[name].blocks.blocks
        is_on_host = (blocks >= self.plan.num_blocks).any()
        hit = self.manager.swap_in(name)
        assert hit.num_host_tokens == (count if is_on_host else 0), "tokens from host memory"
        assert hit.num_cached_tokens == count < min(hit.chunk_ends, default=count + 1)
        found = self.lost_ends(name)
        for ends in (found, lost_ends):  # later ones were rewound: the next step computes them anew
            ends[:] = [end if end <= count else 0 for end in ends]
        assert found == lost_ends, "states in blocks of drafts are taken for others"
        self.requests[name], self.prefixes.prompts[name] = request, prompt
        self.oracle.resume(request)

    def lost_ends(self, name: Hashable) -> list[int]:
        state = self.manager._state
        return state.lost_ends[:, self.manager.requests[name]].tolist()

    def forget_parked(self) -> None:
        for name in self.swapped:
            assert not self.manager.num_swapped_tokens(name)
        self.swapped.clear()

    def new_epoch(self) -> None:
        super().new_epoch()
        self.forget_parked()

    def lose_content(self) -> None:
        super().lose_content()
        self.forget_parked()

    def reset(self) -> None:
        super().reset()
        self.forget_parked()

    def serve(self) -> None:
        """Computes a prompt in steps of its own, and ends it."""
        before = len(self.requests)
        self.start()
        if len(self.requests) == before:
            return
        name = list(self.requests)[-1]
        request = self.requests[name]
        most = min(self.plan.limits.max_in_flight_tokens, self.plan.max_model_len)
        while (left := len(request.tokens) - request.computed) > 0:
            self.chosen = {name: min(left, most)}
            before = request.computed
            self.step()
            if request.computed == before or name not in self.requests:
                break
            self.check()
        self.chosen = None
        if name in self.requests:
            self.end(name)

    def work(self) -> dict[Hashable, int]:
        return super().work() if self.chosen is None else self.chosen
