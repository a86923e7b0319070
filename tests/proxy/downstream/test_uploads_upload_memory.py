"""Memory for bodies that are being received: it is bounded, and somebody can always go on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.proxy.downstream.uploads import STEP_BYTES, Share, UploadMemory

LARGEST = 8 * STEP_BYTES


class Body:
    """One that needs `steps` of memory, one after the other, and holds all it got until it is whole."""

    def __init__(self, memory: UploadMemory, steps: int) -> None:
        self.memory = memory
        self.share: Share = memory.share(self.granted)
        self.needs = steps
        self.waits = False

    def granted(self) -> None:
        assert self.waits
        self.waits = False

    def go_on(self) -> None:
        """One step, or the end."""
        assert not self.waits
        if self.share.granted >= self.needs * STEP_BYTES:
            self.memory.give_back(self.share)
            self.needs = 0
        elif not self.memory.ask(self.share):
            self.waits = True


@settings(deadline=None)
@given(
    st.integers(0, 24),
    st.lists(st.integers(1, LARGEST // STEP_BYTES), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
    st.floats(0, 0.2),
)
def test_every_body_ends_however_many_stop_half_way(
    pool: int, sizes: list[int], chance: object, lost: float
) -> None:
    memory = UploadMemory(LARGEST + pool * STEP_BYTES, LARGEST)
    bodies = [Body(memory, size) for size in sizes]
    for _ in range(sum(sizes) + 2 * len(sizes) + 1):
        going = [body for body in bodies if body.needs and not body.waits]
        if not going:
            break
        body = chance.choice(going)  # type: ignore[attr-defined]
        if chance.random() < lost:  # type: ignore[attr-defined]
            memory.give_back(body.share)  # its client has left
            body.needs = 0
        else:
            body.go_on()
        assert memory.used <= LARGEST + pool * STEP_BYTES
        assert memory.used == sum(one.share.granted for one in bodies)
    assert not [body for body in bodies if body.needs]
    assert memory.used == memory.waiting == 0


def test_the_earliest_body_proceeds_first() -> None:
    memory = UploadMemory(LARGEST, LARGEST)  # one at a time
    first, second, third = (Body(memory, 2) for _ in range(3))
    third.go_on()
    second.go_on()
    first.go_on()
    assert (first.waits, second.waits, third.waits) == (True, True, False)
    memory.give_back(third.share)
    memory.give_back(third.share)
    assert (first.waits, second.waits) == (False, True)
    memory.give_back(first.share)
    assert not second.waits
    assert memory.used == STEP_BYTES


def test_a_client_that_leaves_while_waiting_is_removed() -> None:
    memory = UploadMemory(LARGEST, LARGEST)
    first, second = Body(memory, 1), Body(memory, 1)
    first.go_on()
    second.go_on()
    memory.give_back(second.share)
    memory.give_back(first.share)
    assert second.waits
    assert memory.used == memory.waiting == 0
