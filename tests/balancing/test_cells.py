"""Which of several balancers a request goes to."""

from __future__ import annotations

from support.balancing import balancer, up

from launcher.balancing.cells import MOST_BEYOND, MOST_INSTANCES, Cell, Cells


def cells(hosts: int, instances: int = 4, *, models: str = "m") -> Cells:
    """Hosts with so many instances each, of the models in turn."""
    made = Cells(lambda: balancer(0))
    for host in range(hosts):
        cell = made.place(instances)
        for slot in range(instances):
            cell.balancer.add(up(host * instances + slot, model=models[host % len(models)]))
        cell.resize()
    return made


def sizes(made: Cells) -> list[int]:
    return [cell.instances() for cell in made]


def send(made: Cells, prefix: tuple[int, ...] = (), model: str = "m") -> Cell:
    chosen = made.choose(model, prefix)
    assert chosen is not None
    chosen.count(model, 1)
    return chosen


def test_one_balancer_has_all_instances_up_to_the_bound_and_then_there_are_more() -> None:
    assert sizes(cells(1, 2)) == [2]
    assert sizes(cells(16)) == [MOST_INSTANCES]
    assert sizes(cells(17)) == [MOST_INSTANCES, 4]
    # A host is never split, however large.
    assert sizes(cells(2, MOST_INSTANCES + 6)) == [MOST_INSTANCES + 6] * 2
    # Before a host has told of its instances there is a place for it.
    assert sizes(cells(3, 0)) == [0]


def test_a_prompt_goes_where_its_beginning_is_held() -> None:
    made = cells(64)
    first = {name: send(made, (name, name + 1000)) for name in range(40)}
    assert len(set(first.values())) == 4  # nothing is held: evenly
    for name in range(40):
        # As a conversation goes on.
        assert send(made, (name, name + 1000, name + 2000)) is first[name]


def test_no_balancer_has_more_than_its_bounded_share() -> None:
    made = cells(64)
    for number in range(400):
        send(made, (1, 2, number + 1000))
    counts = [cell.requests["m"] for cell in made]
    assert sum(counts) == 400
    assert 100 < max(counts) <= 100 + MOST_BEYOND * 10 + 1
    # The last one holds it, too, by now.
    assert min(counts) >= 60


def test_shares_go_by_the_instances_that_serve_the_model() -> None:
    made = cells(18, models="mn")  # 32 of each in the first balancer, 4 of each in the second
    assert [len(cell.balancer.table.of("n")) for cell in made] == [32, 4]
    for _ in range(90):
        send(made, model="n")
    big, small = made
    assert abs(big.requests["n"] - 8 * small.requests["n"]) <= 9
    assert made.choose("another", ()) is None


def test_only_balancers_with_an_instance_not_yet_tried_are_chosen() -> None:
    made = cells(17)
    big, small = made
    tried = {upstream.key for upstream in big.balancer.table}
    assert made.choose("m", (), tried) is small
    assert made.choose("m", (), tried | {upstream.key for upstream in small.balancer.table}) is None


def test_requests_that_have_left_count_no_more() -> None:
    made = cells(32)
    busy, other = made
    busy.count("m", 50)
    assert {send(made) for _ in range(20)} == {other}
    busy.count("m", -50)
    assert send(made) is busy


def test_a_single_balancer_is_chosen_however_busy() -> None:
    made = cells(1)
    (only,) = made
    only.count("m", 1000)
    assert made.choose("m", (1,)) is only
    assert not len(only.prefixes)  # there is nothing to choose between


def test_what_a_cell_is_believed_to_hold_is_what_its_instances_can() -> None:
    made = cells(17)
    big, small = made
    assert big.prefixes.capacity == 16 * small.prefixes.capacity
    assert small.prefixes.capacity == 4 * next(iter(small.balancer.table)).prefixes.capacity
