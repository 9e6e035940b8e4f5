"""The least code that moves bytes with each binding: what the verbs fabric is measured against. One connection, one buffer."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from afore.transport.verbs.memory import view_address

ACCESS = 7
"""Local write, remote write, remote read."""
SIGNALED = 2
WRITE, WRITE_WITH_IMMEDIATE, RECEIVED_IMMEDIATE = 0, 1, 129
DEPTH = 64
PORT = 1
Completion = tuple[int, int]
"""(request number, opcode)"""


class Buffer:
    """Anonymous memory to register."""

    def __init__(self, nbytes: int) -> None:
        self.pages = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = view_address(memoryview(self.pages))


class BareIbverbs:
    """Over PyPI's ibverbs."""

    def __init__(self, device: str, gid_index: int, buffer: Buffer) -> None:
        import ibverbs as ib

        self.ib = ib
        self.context = next(one for one in ib.get_device_list() if one.name == device).open()
        self.gid_index = gid_index
        self.pd = self.context.alloc_pd()
        self.channel = self.context.create_comp_channel()
        self.fd = self.channel.fd
        self.cq = self.context.create_cq(2 * DEPTH, self.channel)
        self.mr = self.pd.reg_mr(buffer.address, buffer.nbytes, ACCESS)
        self.address = buffer.address
        self.qp = self.pd.create_qp(
            ib.QPInitAttr(
                send_cq=self.cq, recv_cq=self.cq, qp_type=ib.QPType.RC, max_send_wr=DEPTH, max_recv_wr=DEPTH,
                max_send_sge=1, max_recv_sge=1,
            )
        )  # fmt: skip
        self.qp.to_init(PORT, ACCESS)

    def info(self) -> dict[str, Any]:
        """What the peer has to know."""
        port, gid = self.context.query_port(PORT), self.context.query_gid(PORT, self.gid_index)
        qp = self.ib.local_qp_info(self.qp, port, gid, port=PORT).to_bytes().hex()
        return {"qp": qp, "rkey": self.mr.rkey, "address": self.address}

    def connect(self, peer: dict[str, Any]) -> None:
        self.peer = peer
        self.qp.to_rtr(self.ib.QPInfo.from_bytes(bytes.fromhex(peer["qp"])), sgid_index=self.gid_index)
        self.qp.to_rts(0, timeout=18)

    def write(self, number: int, nbytes: int, immediate: int | None = None) -> None:
        self.qp.post_send(
            self.ib.SendWR(
                wr_id=number, sg_list=[self.ib.SGE(self.mr, nbytes, offset=0)], send_flags=SIGNALED,
                opcode=WRITE if immediate is None else WRITE_WITH_IMMEDIATE,
                remote_addr=self.peer["address"], rkey=self.peer["rkey"], imm_data=immediate or 0,
            )
        )  # fmt: skip

    def post_receives(self, count: int) -> None:
        for _ in range(count):
            self.qp.post_recv(self.ib.RecvWR())

    def poll(self) -> list[Completion]:
        found = []
        for wc in self.cq.poll(16):
            wc.raise_for_status()
            found.append((wc.wr_id, int(wc.opcode)))
        return found

    def arm(self) -> None:
        self.cq.req_notify()

    def take_event(self) -> None:
        self.channel.get_cq_event().ack_events(1)

    def close(self) -> None:
        for thing in (self.qp, self.cq, self.channel, self.mr, self.pd, self.context):
            thing.close()


class BarePyverbs:
    """Over rdma-core's pyverbs, 44 and newer."""

    def __init__(self, device: str, gid_index: int, buffer: Buffer) -> None:
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
        from pyverbs.wr import SGE, RecvWR, SendWR

        self.SGE, self.SendWR, self.RecvWR, self.QPAttr = SGE, SendWR, RecvWR, QPAttr
        self.context = Context(name=device)
        self.gid_index = gid_index
        self.pd = PD(self.context)
        before = _event_fds()
        self.channel = CompChannel(self.context)
        self.fd = (_event_fds() - before).pop()
        os.set_blocking(self.fd, False)
        self.cq = CQ(self.context, 2 * DEPTH, None, self.channel, 0)
        self.mr = MR(self.pd, buffer.nbytes, ACCESS, address=buffer.address)
        self.address = buffer.address
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        self.qp = QP(self.pd, QPInitAttr(qp_type=2, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0))
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        self.qp.to_init(attributes)

    def info(self) -> dict[str, Any]:
        """What the peer has to know."""
        gid = self.context.query_gid(PORT, self.gid_index).gid
        return {"qp": self.qp.qp_num, "gid": gid, "rkey": self.mr.rkey, "address": self.address}

    def connect(self, peer: dict[str, Any]) -> None:
        from pyverbs.addr import GID, AHAttr, GlobalRoute

        self.peer = peer
        attributes = self.QPAttr(port_num=PORT)
        attributes.path_mtu = self.context.query_port(PORT).active_mtu
        attributes.dest_qp_num = peer["qp"]
        attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 12
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(is_global=1, port_num=PORT, gr=route)
        self.qp.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry, attributes.max_rd_atomic = 18, 7, 7, 1
        self.qp.to_rts(attributes)

    def write(self, number: int, nbytes: int, immediate: int | None = None) -> None:
        entry = self.SGE(self.address, nbytes, self.mr.lkey)
        request = self.SendWR(
            number, opcode=WRITE if immediate is None else WRITE_WITH_IMMEDIATE, num_sge=1,
            imm_data=immediate or 0, sg=[entry], send_flags=SIGNALED,
        )  # fmt: skip
        request.set_wr_rdma(self.peer["rkey"], self.peer["address"])
        self.qp.post_send(request)
        request.close()
        entry.close()

    def post_receives(self, count: int) -> None:
        entry = self.SGE(self.address, 1, self.mr.lkey)
        request = self.RecvWR(num_sge=1, sg=[entry])
        for _ in range(count):
            self.qp.post_recv(request)
        request.close()
        entry.close()

    def poll(self) -> list[Completion]:
        found = []
        for wc in self.cq.poll(16)[1]:
            if wc.status:
                raise OSError(f"request {wc.wr_id} failed with status {wc.status}")
            found.append((wc.wr_id, wc.opcode))
        return found

    def arm(self) -> None:
        self.cq.req_notify()

    def take_event(self) -> None:
        self.channel.get_cq_event(self.cq)
        self.cq.ack_events(1)

    def close(self) -> None:
        self.context.close()


Bare = BareIbverbs | BarePyverbs
BARE: dict[str, Callable[[str, int, Buffer], Bare]] = {"pyverbs": BarePyverbs, "ibverbs": BareIbverbs}


def _event_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name) == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except OSError:
            pass
    return found
