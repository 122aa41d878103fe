"""Simulations of a manager whose blocks are shared, copied and given back between its steps."""

from collections.abc import Callable, Hashable

from jaxkv import OutOfBlocksError
from tests.simulation.of_manager import ManagerSimulation
from tests.simulation.of_offload import OffloadSimulation


class CopySimulation(ManagerSimulation):
    """Requests that grow, fork, end and come from other caches before any step makes copies."""

    def __init__(self, seed: int, kind: str | None, history: list[str]):
        super().__init__(seed, kind, history)
        self.has_peers = not self.has_encoder

    def num_rows(self) -> int:
        return self.draw.randint(2, 6)

    def calls(self) -> dict[Callable[[], object], float]:
        others = self.finish, self.rewind, self.trim, self.hand_over
        calls: dict[Callable[[], object], float] = dict.fromkeys(others, 1)
        calls |= {self.start: 4, self.step: 6, self.share_blocks: 8}
        return calls | ({self.receive: 1, self.export: 1} if self.has_peers else {})

    def work(self) -> dict[Hashable, int]:
        """Returns work that verifies as many drafts as a plan admits more often than others."""
        work = super().work()
        for name in filter(self.has_moved, list(self.requests)):
            self.grow_past(name)
        for name in work if self.drafts else ():
            if self.chance(0.4) and not self.has_moved(name):
                room = self.plan.max_model_len - self.requests[name].computed
                most = min(room, self.plan.limits.max_in_flight_tokens)
                work = {**work, name: min(1 + self.drafts, most)}
        return work

    def grow_past(self, name: Hashable) -> None:
        """Lets a request grow whose state is in the block of a draft: not beyond that block."""
        request = self.requests[name]
        before, groups = request.computed, [g for g in self.oracle.groups if g.is_state]
        room = self.plan.max_model_len - before
        count = self.draw.randint(1, min(room, self.plan.limits.max_in_flight_tokens) or 1)
        self.say(f"grow({{{name!r}: {count}}})")
        is_lost = any(
            request.states[group.index][before] not in group.state_blocks(before, before + count)
            for group in groups
        )
        errors = ValueError, OutOfBlocksError
        is_refused = self.refused(lambda: self.manager.grow({name: count}), *errors)
        assert is_refused or not is_lost, "a step that cannot read its state is accepted"

    def share_blocks(self) -> None:
        """Lets requests of one prefix grow, which copies blocks, and makes other calls then."""
        donor = max(self.requests.values(), key=lambda request: request.computed)
        self.fork_into(donor, donor.computed, self.draw.randint(0, 2))
        calls = [self.grow, self.grow, self.fork, self.rewind, self.finish, self.trim]
        calls += [self.receive, self.receive] * self.has_peers
        self.grow()
        for call in self.draw.choices(calls, k=self.draw.randint(0, 4)):
            if self.requests:
                call()
                self.check()


class OffloadCopySimulation(CopySimulation, OffloadSimulation):
    """Such requests next to host memory, from which blocks are loaded before copies are made."""
