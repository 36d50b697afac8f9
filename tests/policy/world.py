"""A random world around the policy: it obeys the actions, in any order it likes, and checks every invariant
as it goes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from msgspec.structs import replace

from gyre_backend.cells.policy import PolicyConfig, decide
from gyre_backend.cells.state import (
    ALWAYS,
    AbortStep,
    Action,
    Assign,
    BeginStep,
    CellBack,
    CellLost,
    Dispatch,
    EndStep,
    Event,
    ExecutionFinished,
    ExecutionStarted,
    GroupDropped,
    GroupReady,
    GroupRequeued,
    GroupTrained,
    MoveDone,
    MoveToRollout,
    MoveToTraining,
    Phase,
    Published,
    QueueLevel,
    Role,
    SchedulerState,
    Tick,
    WakeAt,
    initial,
)


@dataclass
class World:
    """Executions finish only while there are rollout slots; groups train only while a cell is in training."""

    config: PolicyConfig
    num_cells: int
    slots: int
    standalone: int
    seed: int
    faults: float = 0.0
    drops: float = 0.0
    state: SchedulerState = field(init=False)
    steps_done: int = 0
    next_group: int = 0
    flying: dict[int, tuple[int, int]] = field(default_factory=dict)  # group -> (version, executions left)
    ended: dict[int, int] = field(default_factory=dict)  # executions are all sealed, not scored yet -> version
    members: list[int] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    published: dict[int, int] = field(default_factory=dict)  # group -> version it trained
    dispatch_version: dict[int, int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    closing: bool = False
    wakes: list[float] = field(default_factory=list)
    losses: int = 0
    log: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.state = initial(self.num_cells, self.slots, standalone=self.standalone)

    def send(self, event: Event) -> None:
        before = self.state
        self.state, actions = decide(before, event, self.config)
        again, repeat = decide(before, event, self.config)
        assert (again, repeat) == (self.state, actions), "not deterministic"
        _, in_full = decide(replace(before, quiet_above=ALWAYS), event, self.config)
        assert in_full == actions, "the shortcut for quiet events missed an action"
        self.log.append((event, actions))
        for action in actions:
            self.obey(action)
        self.check(before, event, actions)

    def obey(self, action: Action) -> None:
        match action:
            case Dispatch(groups, version):
                assert groups > 0
                assert version == self.state.version
                for _ in range(groups):
                    self.flying[self.next_group] = (version, self.config.group_size)
                    self.dispatch_version[self.next_group] = version
                    self.next_group += 1
            case BeginStep(version):
                assert version == self.steps_done
                assert not self.members
                assert not self.closing
            case Assign(version, groups):
                assert version == self.steps_done
                for group in groups:
                    assert group not in self.members
                    assert group not in self.published
                    self.members.append(group)
            case EndStep(version):
                assert version == self.steps_done
                assert len(self.members) == self.config.groups_per_step
                assert self.trained == set(self.members)
                self.closing = True
            case AbortStep(version, groups):
                assert set(groups) == set(self.members)
                self.members, self.trained, self.closing = [], set(), False
            case WakeAt(time):
                self.wakes.append(time)

    def check(self, before: SchedulerState, event: Event, actions: list[Action]) -> None:
        config, state = self.config, self.state
        assert state.ignored == before.ignored, f"the world only sends possible events, yet {event} was ignored"
        moving = state.count(Role.TO_TRAINING) + state.count(Role.TO_ROLLOUT)
        moves = [a for a in actions if isinstance(a, MoveToTraining | MoveToRollout)]
        if config.moves == "serial":
            assert moving <= 1
            assert len(moves) <= 1
            for action in actions:
                if isinstance(action, MoveToTraining):
                    assert state.waterlevel <= state.capacity, "w > C_R - C_e"
                    assert action.cell == 0 or state.cells[0].role is Role.TRAINING, "a satellite without its core"
        capacity = state.standalone + sum(c.slots for c in state.cells if c.role is Role.ROLLOUT)
        assert state.capacity == capacity
        assert state.num_moving == moving
        assert state.num_training == state.count(Role.TRAINING)
        if not before.refill and not isinstance(event, Published | GroupDropped):
            assert state.waterlevel <= before.waterlevel, "w rose within a burst"
        assert state.outstanding <= max(config.limit, before.outstanding)
        assert state.num_inflight == len(self.flying) + len(self.ended)
        assert sum(n for _, n in state.inflight) == state.num_inflight
        assert len(state.members) <= config.groups_per_step
        assert state.finished <= state.started <= state.dispatched
        # Nothing lost: every group ever sent is in exactly one place.
        places = [set(self.flying) | set(self.ended), {g.id for g in state.ready}, set(self.members)]
        places += [set(self.published), self.dropped]
        assert sum(map(len, places)) == self.next_group
        assert len(set().union(*places)) == self.next_group

    def possible(self) -> list[str]:
        state, out = self.state, []
        if self.flying and state.capacity > 0:
            out += ["finish"] * 6
        if state.started < min(state.dispatched, state.finished + state.capacity):
            out.append("start")
        if self.ended:
            out += ["score"] * 3
        if state.count(Role.TRAINING) and set(self.members) - self.trained and not self.closing:
            out += ["train"] * 3
        if state.count(Role.TO_TRAINING) + state.count(Role.TO_ROLLOUT):
            out += ["arrive"] * 3
        if self.closing:
            out.append("publish")
        if self.wakes:
            out.append("wake")
        if state.count(Role.LOST):
            out += ["back"] * 2
        return out

    def act(self) -> None:
        rng, state = self.rng, self.state
        now = state.now + rng.choice((0.0, 0.1, 1.0, 30.0))
        live = [i for i, c in enumerate(state.cells) if c.role is not Role.LOST]
        if live and rng.random() < self.faults:
            self.lose(rng.choice(live), now)
            return
        choices = self.possible()
        assert choices, f"deadlock at step {self.steps_done}: {state}"
        match rng.choice(choices):
            case "finish":
                group = rng.choice(list(self.flying))
                version, left = self.flying[group]
                if left == 1:
                    del self.flying[group]
                    self.ended[group] = version
                else:
                    self.flying[group] = (version, left - 1)
                self.send(ExecutionFinished(now))
            case "start":
                self.send(ExecutionStarted(now))
            case "score":
                group = rng.choice(list(self.ended))
                version = self.ended.pop(group)
                if rng.random() < self.drops:
                    self.dropped.add(group)
                    self.send(GroupDropped(now, version))
                else:
                    self.send(GroupReady(now, group, version, rng.choice((0.0, 5.0, 500.0))))
            case "train":
                group = rng.choice([g for g in self.members if g not in self.trained])
                self.trained.add(group)
                left = len(self.members) - len(self.trained)
                self.send(QueueLevel(now, left, 100.0 * left))
                self.send(GroupTrained(now, group))
            case "arrive":
                moving = [i for i, c in enumerate(state.cells) if c.role in (Role.TO_TRAINING, Role.TO_ROLLOUT)]
                self.send(MoveDone(now, rng.choice(moving)))
            case "publish":
                for group in self.members:
                    self.published[group] = self.steps_done
                self.members, self.trained, self.closing = [], set(), False
                self.steps_done += 1
                self.send(Published(now, self.steps_done))
            case "wake":
                self.send(Tick(max(now, self.wakes.pop(0))))
            case "back":
                lost = [i for i, c in enumerate(state.cells) if c.role is Role.LOST]
                self.send(CellBack(now, rng.choice(lost)))

    def lose(self, cell: int, now: float) -> None:
        self.losses += 1
        trains = self.state.cells[cell].role is Role.TRAINING
        self.send(CellLost(now, cell))
        if cell != 0 and trains and self.trained and self.state.phase is not Phase.IDLE:
            group = self.rng.choice(sorted(self.trained))
            self.trained.discard(group)
            self.closing = False
            self.send(GroupRequeued(now, group))

    def run(self, steps: int, budget: int = 20_000) -> None:
        """Until `steps` are published; a world that needs more than `budget` events is starved."""
        self.send(Tick(0.0))
        for _ in range(budget):
            if self.steps_done >= steps:
                break
            self.act()
        assert self.steps_done >= steps, f"starved after {budget} events: {self.state}"
        if self.config.max_staleness is not None:
            late = {g: v - self.dispatch_version[g] for g, v in self.published.items()}
            assert max(late.values()) <= self.config.max_staleness
