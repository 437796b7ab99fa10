from rollout_queue.messages import RequestId
from trainer_svc.order import DataOrder


def order(**changes: object) -> DataOrder:
    values = {"num_items": 10, "groups_per_step": 4, "seed": 0, "shuffle": True, "epochs": 0, "max_steps": 7}
    return DataOrder(**{**values, **changes})  # type: ignore[arg-type]


def walk(data: DataOrder) -> list[int]:
    return [data.item(RequestId(s, i)) for s in range(data.total_steps()) for i in range(data.slots(s))]


def test_every_epoch_is_a_permutation_and_epochs_differ():
    items = walk(order(epochs=2, max_steps=0))
    assert sorted(items[:10]) == sorted(items[10:]) == list(range(10))
    assert items[:10] != items[10:]


def test_unshuffled_order_is_the_file_order():
    assert walk(order(shuffle=False, epochs=1, max_steps=0)) == list(range(10))


def test_steps_and_slots_of_data_that_do_not_divide():
    data = order(epochs=1, max_steps=0)  # 10 items in batches of 4: 4 + 4 + 2
    assert data.total_steps() == 3
    assert [data.slots(s) for s in range(4)] == [4, 4, 2, 0]


def test_data_smaller_than_one_batch():
    data = order(num_items=3, epochs=1, max_steps=0)
    assert (data.total_steps(), data.slots(0)) == (1, 3)


def test_max_steps_ends_first_and_repeats_the_data_without_epochs():
    assert order(max_steps=2, epochs=5).total_steps() == 2
    assert len(walk(order(max_steps=7))) == 28


def test_access_in_any_order_gives_the_same_items():
    data = order()
    ids = [RequestId(s, i) for s in range(7) for i in range(4)]
    forward = {r: data.item(r) for r in ids}
    assert {r: data.item(r) for r in reversed(ids)} == forward


def test_replacements_do_not_depend_on_timing_and_leave_the_main_order_alone():
    data = order()
    before = walk(data)
    spare = [data.item(RequestId(2, 1, r)) for r in range(1, 9)]
    assert spare == [order().item(RequestId(2, 1, r)) for r in range(1, 9)]
    assert len(set(spare)) > 1
    assert walk(data) == before


def test_seeds_differ_by_request_and_by_run():
    data = order()
    seeds = {data.request_seed(RequestId(s, i, r)) for s in range(20) for i in range(4) for r in range(2)}
    assert len(seeds) == 160
    assert data.request_seed(RequestId(0, 0)) != order(seed=1).request_seed(RequestId(0, 0))
