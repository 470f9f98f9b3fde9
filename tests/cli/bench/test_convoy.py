"""`aiokv bench convoy`: one copy per block however many ask, also when the first of them leaves."""

from __future__ import annotations

import json

import pytest

from aiokv.cli.bench.convoy.runner import complaints_about
from aiokv.cli.bench.convoy.settings import ConvoySettings
from tests.cli.test_main import run

CLIENTS, BLOCKS, ROUNDS = 12, 40, 2
ASKED = {"alone": 1, "alone_prepared": 1, "crowd": CLIENTS, "crowd_prepared": CLIENTS, "leader_cancelled": CLIENTS - 1}


def test_each_block_is_copied_once_and_every_client_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    """Law 4: the copy is the transfer's, so that it goes on when the request that asked for it first has left."""
    arguments = ("--clients", str(CLIENTS), "--tokens", str(BLOCKS * 16 + 5), "--rounds", str(ROUNDS))
    assert run("bench", "convoy", *arguments, "--block-bytes", "4096", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["ok"], report["prefix_blocks"]) == (1, True, BLOCKS)
    for way, clients in ASKED.items():
        seen, prompts = report[way], clients * ROUNDS
        assert seen["served"] == prompts
        assert seen["cancelled"] == (ROUNDS if way == "leader_cancelled" else 0)
        assert seen["copies_per_round"] == seen["loaded_blocks_per_round"] == BLOCKS
        assert seen["most_copies_of_a_block"] == 1
        assert seen["wrong_blocks"] == 0
        assert seen["tokens"] == {
            "gpu": 0,
            "cpu": prompts * BLOCKS * 16,
            "compute": prompts * 16,
            "prompt": prompts * (BLOCKS + 1) * 16,
        }
    assert report["ratio_p99"] > 0.0


def test_a_second_copy_of_a_block_is_a_complaint() -> None:
    settings = ConvoySettings(clients=2, tokens=32, rounds=1)
    seen = {
        way: {
            "served": clients,
            "cancelled": int(way == "leader_cancelled"),
            "copies_per_round": 2,
            "most_copies_of_a_block": 1,
            "loaded_blocks_per_round": 2,
            "wrong_blocks": 0,
            "tokens": {"gpu": 0, "cpu": 32 * clients, "compute": 16 * clients, "prompt": 48 * clients},
        }
        for way, clients in (ASKED | {"crowd": 2, "crowd_prepared": 2, "leader_cancelled": 1}).items()
    }
    assert complaints_about(seen, settings=settings) == ()
    broken = seen | {"crowd": seen["crowd"] | {"most_copies_of_a_block": 2, "copies_per_round": 4}}
    assert complaints_about(broken, settings=settings) == (
        "crowd: copies_per_round is 4, not 2",
        "crowd: most_copies_of_a_block is 2, not 1",
    )
