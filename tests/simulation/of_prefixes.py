"""Simulations of a manager that keeps what its requests compute, and finds all of it again."""

from collections.abc import Callable, Hashable

from jaxkv import HostMemory, Plan
from tests.simulation.of_manager import ManagerSimulation
from tests.simulation.plans import KINDS, random_plan

SHARED = [kind for kind in KINDS if kind != "cross"]


class PrefixSimulation(ManagerSimulation):
    """Requests whose chunks end where states are kept, in a pool with room for some prompts."""

    def random_plan(self) -> Plan:
        while True:
            plan = random_plan(self.draw, self.kind, room=(1.5, 2.5, 5))
            if not any(group.growth.speculative_blocks for group in plan.groups):
                return plan

    def host_memory(self, seed: int) -> HostMemory | None:
        return None

    def share(self) -> float:
        return 1.0

    def num_rows(self) -> int:
        return 4

    def calls(self) -> dict[Callable[[], object], float]:
        others = dict.fromkeys(super().calls(), self.draw.choice([0, 0.3, 1]))
        return others | {self.start: 8, self.step: 12, self.finish: 3}

    def meanwhile(self) -> None:
        """Makes another call between the lookup of a prompt and its start."""
        if self.requests:
            self.draw.choice([self.step, self.step, self.finish, lambda: None])()
        if self.chance(0.05):
            self.new_epoch()

    def work(self) -> dict[Hashable, int]:
        work = super().work()
        for name, count in work.items():
            prompt, computed = self.prefixes.prompts[name], self.requests[name].computed
            ends = [] if prompt is None else [end - computed for end in prompt.ends]
            inside = [end for end in ends if 0 < end <= count]
            if inside and self.chance(0.8):
                work[name] = min(inside)
        return work
