"""Which replica a request goes to."""

from __future__ import annotations

from moeflux.replicas.affinity import EARLY, WEIGHT, Affinity

PLACES = (("a", 1000), ("b", 50_000))
REPLICAS = ["x", "y", "z"]


def test_those_that_know_nothing_take_turns() -> None:
    affinity = Affinity()
    taken = []
    for number in range(6):
        (first, *_) = affinity.order(REPLICAS, ())
        taken.append(first)
        affinity.begun(str(number), first, ())
        affinity.ended(str(number))
    assert taken == [*REPLICAS, *REPLICAS]


def test_a_conversation_goes_where_it_was_and_elsewhere_when_too_many_are_there() -> None:
    affinity = Affinity()
    affinity.begun("1", "y", PLACES)
    assert affinity.order(REPLICAS, PLACES)[0] == "y"
    more = (*PLACES, ("c", 51_000))
    assert affinity.order(REPLICAS, more)[0] == "y"
    for number in range(50_000 // WEIGHT):
        affinity.begun(f"more {number}", "y", ())
    assert affinity.order(REPLICAS, more)[0] == "x", "as many answers as weigh more than what is to be read"
    affinity.ended("1")
    assert affinity.order(REPLICAS, more)[0] == "y"


def test_what_all_share_binds_nobody() -> None:
    affinity = Affinity()
    affinity.begun("1", "x", PLACES[:1])
    assert affinity.order(REPLICAS, (PLACES[0], ("other", 1200)))[0] == "y"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    affinity = Affinity()
    affinity.begun("1", "z", PLACES)
    affinity.begun("2", "y", PLACES[:1])
    affinity.lost("z")
    affinity.ended("1")
    assert affinity.order(["x", "y"], PLACES)[0] == "x", "one answer more weighs more than a short place"
    affinity.ended("2")
    assert affinity.order(["x", "y"], PLACES)[0] == "y"


def test_what_is_remembered_is_bounded() -> None:
    affinity = Affinity(most=10)
    for number in range(100):
        affinity.begun(str(number), "x", ((f"place {number}", 9000),))
        affinity.ended(str(number))
    assert len(affinity._where) == 10
    assert affinity.order(["y", "x"], (("place 95", 9000),)) == ["x", "y"]
    assert affinity.order(["y", "x"], (("place 3", 9000),)) == ["y", "x"]
    for number in range(2 * EARLY):  # that never began here
        affinity.ended(f"broadcast {number}")
    assert len(affinity._early) == EARLY


def test_one_that_is_over_before_it_is_known_to_begin_weighs_nothing() -> None:
    affinity = Affinity()
    affinity.ended("1")
    affinity.begun("1", "x", ())
    assert affinity._at == {}
