"""Prints digests of the uploads of random traffic: ``python -m tests.upload_trace``. No jax."""

import hashlib
import random

import jaxkv

KV = {"block_size": 4, "num_kv_heads": 1, "head_size": 4}
LAYERS = {
    "full": jaxkv.FullAttentionSpec(**KV),
    "window": jaxkv.SlidingWindowSpec(sliding_window=6, **KV),
    "state": jaxkv.StateSpec(block_size=4, shapes=((8,),), dtypes=("f32",), speculative_blocks=2),
}
MAX_REQUESTS, MAX_TOKENS, FORKS, LONGEST = 6, 16, 3, 48


class Traffic:
    """Random traffic: arrivals, chunked prompts, forks, preemptions; drafts or shared prefixes."""

    def __init__(self, seed: int, shares: bool):
        self.draw = random.Random(seed)
        plan = jaxkv.plan_cache(
            LAYERS,
            2**30,
            max_model_len=LONGEST,
            num_blocks_override=64,
            limits=jaxkv.Limits(max_in_flight_tokens=8),
            zero_policy="always",
        )
        self.manager = jaxkv.BlockManager(plan, max_requests=MAX_REQUESTS)
        self.tokens: dict[str, list[int]] = {}
        self.shares = shares
        self.scheduler = jaxkv.Scheduler(
            self.manager,
            max_tokens=MAX_TOKENS,
            forks=FORKS,
            tokens=self.tokens if shares else None,
        )
        self.shape = jaxkv.StepShape.for_plan(
            plan,
            max_requests=MAX_REQUESTS,
            max_tokens=MAX_TOKENS,
            forks=FORKS,
            cached_tokens=LONGEST if shares else 0,
        )
        self.digest = hashlib.sha256()
        self.drafts: dict[str, int] = {}
        self.seen = dict.fromkeys(("preempted", "forked", "rejected"), 0)

    def step(self, arrival: str | None) -> None:
        if arrival is not None:
            length, family = self.draw.randint(1, 30), self.draw.randint(0, 2)
            self.tokens[arrival] = [family + i for i in range(length)]
            salt = self.draw.choice(["tenant", None]) if self.shares else None
            self.scheduler.add(arrival, length, max_tokens=LONGEST, salt=salt)
        schedule = self.scheduler.schedule()
        self.seen["preempted"] += len(schedule.preempted)
        self.drafts |= dict.fromkeys(schedule.preempted, 0)  # recomputed like tokens of a prompt
        self.digest.update(self.manager.step(self.shape, schedule.work).data.tobytes())
        for name in schedule.samples:
            self.sample(name)

    def sample(self, name: str) -> None:
        """Rejects some drafts of a request, then appends a token, new drafts, perhaps a fork."""
        length = self.scheduler.num_tokens(name)
        rejected = self.draw.randint(0, self.drafts.get(name, 0))
        if rejected:
            self.scheduler.rewind({name: length - rejected})
            self.seen["rejected"] += 1
        if length > LONGEST - 4:
            self.scheduler.finish(name)
            del self.tokens[name]
            return
        self.tokens[name].append(length % 3)
        sample = f"{name}+"
        if self.draw.random() < 0.1 and sample not in self.names():
            self.tokens[sample] = [*self.tokens[name][:-1], 7]
            self.scheduler.fork(name, [sample])
            self.scheduler.append({sample: 1})
            self.seen["forked"] += 1
        self.drafts[name] = 0 if self.shares else self.draw.randint(0, 2)
        self.scheduler.append({name: 1 + self.drafts[name]})

    def names(self) -> tuple[str, ...]:
        return (*self.scheduler.running, *self.scheduler.waiting)


def main() -> None:
    for seed in range(5):
        traffic = Traffic(seed, shares=seed > 2)
        for number in range(120):
            traffic.step(f"request {number}" if number % 3 == 0 else None)
        print(seed, traffic.digest.hexdigest(), traffic.seen)


if __name__ == "__main__":
    main()
