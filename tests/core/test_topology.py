"""Topologies on several nodes: what is refused, always as a ``ConfigError`` that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.core.topology import Topology

TWO = {"a": "door,attention,prefill", "b": "scheduler,ffn"}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
PARTS = st.sampled_from(["door", "attention", "attention-1", "prefill", "scheduler", "ffn", "ffn-0", "ffn-3", "", "x"])
NAMES = st.lists(PARTS, max_size=8).map(",".join)


@given(
    nodes=SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(SCALARS, SCALARS | NAMES | st.lists(SCALARS)),
    node=st.none() | st.text(max_size=8),
    listen=st.none() | st.text(max_size=8),
)
def test_whatever_a_file_says_is_a_topology_or_refused(nodes: Any, node: str | None, listen: str | None) -> None:
    try:
        topology = Topology(nodes=nodes, node=node, listen=listen)
    except ConfigError:
        return
    if topology.nodes is not None:
        assert {topology.node_of(*member) for member in topology.members()} <= topology.nodes.keys()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"nodes": {1: "door,attention,prefill,scheduler,ffn"}}, "1 is no name.*in quotes"),
        ({"nodes": {"a": ["door"]}}, "topology.nodes"),
        ({"nodes": ["a"]}, "is no map"),
        ({"nodes": {**TWO, "c": "ffn-4"}}, "'ffn-4' is no member"),
        ({"nodes": {**TWO, "c": "ffn"}}, "ffn is on b and on c"),
        ({"nodes": TWO, "fabric": "shm"}, "shm leads to no other node"),
        ({"node": "a", "fabric": "loopback"}, "loopback leads to no other node"),
        ({"listen": "10.0.0.1:5"}, "topology.listen.*without a port"),
        ({"listen": "0.0.0.0"}, "topology.listen.*others cannot connect"),
        ({"listen": "::"}, "topology.listen.*others cannot connect"),
        ({"listen": ""}, "topology.listen"),
        ({"listen": "a;b"}, "topology.listen"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Topology(**given)


def test_a_member_by_name_goes_before_its_role() -> None:
    topology = Topology(nodes={"a": "door,attention,prefill", "b": "scheduler,ffn,attention-1", "c": "ffn-3"})
    assert [topology.node_of("attention", rank) for rank in range(2)] == ["a", "b"]
    assert [topology.node_of("ffn", rank) for rank in range(4)] == ["b", "b", "b", "c"]
