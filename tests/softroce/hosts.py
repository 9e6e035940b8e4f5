"""One cluster on two machines with RDMA between them, each of which runs this: tokens as the model's own.

    AFORE_SECRET=$(openssl rand -hex 32) tests/softroce/uml --vms 2 --memory 3072 -- python -m tests.softroce.hosts --api pyverbs

The first machine (SOFTROCE_RANK 0) has door, attention, prefill and asks; the second has scheduler and FFN workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.reference import Reference
from afore.models.tokenizer import Tokenizer
from tests.serving.asking import ask_url
from tests.serving.launcher import Launcher
from tests.softroce.device import sent_packets

PROMPTS, TOKENS = 4, 24
PORT = 29600
PATIENCE_S = 900.0
ROLES = ("door,attention,prefill", "scheduler,ffn")


def start(api: str, rank: int, folder: Path) -> Launcher:
    """This machine's roles."""
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.environ["AFORE_SECRET"])
    first = os.environ["SOFTROCE_ADDRESSES"].split(",")[0]
    file = folder / "cluster.yaml"
    file.write_text(
        "attention: 1\nffn: 1\nredundant_slots: 4\nfabric: verbs\n"
        f"rendezvous: {first}:{PORT}\nrendezvous_remote: true\nsecret_file: {secret}\n"
    )
    return Launcher(
        "--role", ROLES[rank], "--topology", str(file), "--verbs.api", api,
        "--times.join_s", str(PATIENCE_S), "--planner.tile_tokens", "1",
    )  # fmt: skip


def check(url: str) -> None:
    """Asks, and compares. Raises ``AssertionError``."""
    tokenizer, reference = Tokenizer(bundled_model_path()), Reference(bundled_model_path())
    for prompt in [prompt.prompt for prompt in bundled_prompts()][:PROMPTS]:
        expected = tokenizer.decode(reference.generate(tokenizer.encode(prompt), TOKENS))
        assert ask_url(url, prompt, TOKENS) == expected, prompt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", choices=["pyverbs", "ibverbs"], required=True)
    options = parser.parse_args()
    rank, device = int(os.environ["SOFTROCE_RANK"]), os.environ["SOFTROCE_DEVICE"]
    before = sent_packets(device)
    with tempfile.TemporaryDirectory() as folder:
        launcher = start(options.api, rank, Path(folder))
        try:
            if rank == 0:
                url = launcher.wait_for("serving tiny-glm4moe at", PATIENCE_S).split(" at ")[1].split(";")[0]
                check(url)
                launcher.signal(signal.SIGTERM)
            status, out, err = launcher.end(PATIENCE_S)
        finally:
            launcher.kill_all()
    packets = sent_packets(device) - before
    sys.stdout.write(f"{options.api}: {ROLES[rank]}: status {status}, {packets} packets sent over {device}\n")
    if rank == 0:
        sys.stdout.write(f"{options.api}: {PROMPTS} answers of {TOKENS} tokens are the model's own\n")
    if status or packets < PROMPTS * TOKENS:
        sys.stdout.write(f"{out}\n{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
