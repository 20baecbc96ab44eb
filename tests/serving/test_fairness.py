"""Turns of tenants."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_redknot.serving.fairness import FairQueue


def test_one_tenant_is_first_come_first_served() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        queue.put("a", item)
    assert [queue.take() for _ in range(6)] == [0, 1, 2, 3, 4, None]


def test_a_hundred_requests_of_one_do_not_starve_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.put("crowd", f"crowd {number}")
    for _ in range(10):
        queue.take()
        queue.charge("crowd", 50)
    queue.put("alone", "alone")
    assert "alone" in [queue.take(), queue.take()]


def test_nobody_saves_up_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.put("steady", f"steady {number}")
    for _ in range(10):
        queue.take()
        queue.charge("steady", 10)
    for number in range(10):
        queue.put("late", f"late {number}")
    first = []
    for _ in range(6):
        item = queue.take()
        assert item is not None
        first.append(item.split()[0])
        queue.charge(first[-1], 10)
    assert Counter(first) == {"steady": 3, "late": 3}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=20, max_size=60))
def test_tenants_that_all_wait_get_equal_shares(costs: list[tuple[str, int]]) -> None:
    """As long as each has something waiting, what they were served differs by no more than one request's cost each."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for item in costs:
        queue.put(item[0], item)
    left = Counter(tenant for tenant, _ in costs)
    served: Counter[str] = Counter()
    tenants = set(left)
    while all(left[tenant] for tenant in tenants):
        item = queue.take()
        assert item is not None
        served[item[0]] += item[1]
        left[item[0]] -= 1
        queue.charge(*item)
        assert max(served[each] for each in tenants) - min(served[each] for each in tenants) <= 2 * 30


def test_items_may_be_passed_over_and_removed() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in (1, 2, 3):
        queue.put("a", item)
    assert queue.take(lambda item: item % 2 == 0) == 2
    assert queue.take(lambda item: False) is None
    queue.remove("a", 1)
    with pytest.raises(ValueError):
        queue.remove("a", 1)
    assert queue.take() == 3
    assert len(queue) == 0


def test_names_of_tenants_do_not_pile_up() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.put(f"tenant {number}", number)
        assert queue.take() == number
        queue.charge(f"tenant {number}", 5)
    assert queue.tenants < 10
