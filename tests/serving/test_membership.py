"""Membership: who may join, when an epoch opens, what a loss does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core import control
from afore.core.errors import ConfigError, WireError
from afore.core.topology import Topology, member_name
from afore.serving.membership import MemberId, Membership

TOPOLOGY = Topology(attention=2, ffn=3, prefill=1)
MEMBERS = [member for member in TOPOLOGY.members() if member[0] != "door"]


def join(membership: Membership, role: str, rank: int = -1) -> int:
    return membership.join(control.Join(role, rank, 1000, f"{role}@{rank}"))


def joined(order: list[MemberId]) -> Membership:
    membership = Membership(TOPOLOGY)
    for role, rank in order:
        assert join(membership, role, rank) == rank
    return membership


@given(st.permutations(MEMBERS), st.permutations(MEMBERS), st.permutations(MEMBERS), st.permutations(MEMBERS))
def test_every_order_comes_to_serve_and_each_phase_waits_for_the_last(
    joins: list[MemberId], loads: list[MemberId], registers: list[MemberId], links: list[MemberId]
) -> None:
    membership = joined(joins)
    for member in loads[:-1]:
        assert membership.loaded(member) == []
    (opened,) = membership.loaded(loads[-1])
    assert isinstance(opened.message, control.OpenEpoch)
    assert set(opened.members) == set(MEMBERS)
    for member in registers[:-1]:
        assert membership.registered(member, control.Regions(1, ())) == []
    (directory,) = membership.registered(registers[-1], control.Regions(1, ()))
    assert isinstance(directory.message, control.DirectoryMessage)
    for count, member in enumerate(links[:-1]):
        assert membership.linked(member, control.Linked(1)) == []
        assert len(membership.missing()) == len(MEMBERS) - count - 1
    (serve,) = membership.linked(links[-1], control.Linked(1))
    assert serve.message == control.Serve(1)
    assert membership.serving
    assert membership.missing() == ()


def test_free_ranks_are_given_in_order_and_run_out_by_name() -> None:
    membership = Membership(TOPOLOGY)
    assert join(membership, "ffn", 1) == 1
    assert [join(membership, "ffn"), join(membership, "ffn")] == [0, 2]
    with pytest.raises(ConfigError, match=r"all 3 ffn ranks of the topology are taken; raise topology\.ffn"):
        join(membership, "ffn")


@pytest.mark.parametrize(
    ("role", "rank", "problem"),
    [
        ("ffm", -1, "'ffm' is not a role"),
        ("ffn", 3, "ranks 0 to 2, not 3"),
        ("ffn", 0, "ffn-0 is already in"),
        ("door", -1, "one door"),
        ("door", 0, "one door"),
    ],
)
def test_what_cannot_join_is_told_why(role: str, rank: int, problem: str) -> None:
    membership = joined([("ffn", 0)])
    with pytest.raises(ConfigError, match=problem):
        join(membership, role, rank)


def test_the_first_loss_ends_the_epoch_and_is_the_one_named() -> None:
    membership = joined(MEMBERS)
    membership.lost(("ffn", 2), "killed")
    membership.lost(("ffn", 1), "cannot write to ffn-2")
    assert membership.lost_member == "ffn-2: killed"
    assert not membership.serving
    assert member_name("ffn", 2) in membership.missing()
    with pytest.raises(ConfigError, match="the cluster has ended"):
        join(membership, "ffn", 2)


def test_phases_cannot_be_skipped_or_repeated_and_epochs_must_agree() -> None:
    membership = joined(MEMBERS)
    with pytest.raises(WireError, match=r"spoke of epoch 1 in epoch 0"):
        membership.linked(("ffn", 0), control.Linked(1))
    membership.loaded(("ffn", 0))
    with pytest.raises(WireError, match="said LOADED when it was LOADED"):
        membership.loaded(("ffn", 0))


def test_where_roles_are_started_by_hand_one_that_leaves_before_the_epoch_only_frees_its_rank() -> None:
    membership = Membership(TOPOLOGY, replaceable=True)
    for role, rank in MEMBERS:
        assert join(membership, role, rank) == rank
    for member in MEMBERS[:-1]:
        membership.loaded(member)
    membership.lost(("ffn", 1), "killed")
    assert membership.lost_member == ""
    assert membership.absent() == ("ffn-1",)
    assert membership.loaded(MEMBERS[-1]) == [], "the epoch waits for the one that left"
    assert join(membership, "ffn") == 1
    (opened,) = membership.loaded(("ffn", 1))
    assert set(opened.members) == set(MEMBERS)
    membership.lost(("ffn", 1), "killed again")
    assert membership.lost_member == "ffn-1: killed again"
