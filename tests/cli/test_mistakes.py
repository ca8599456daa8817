"""Mistakes that can be known at once are told at once, and without what takes long to import."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from support.cases import case
from support.nodes import HOST, NodeRing

from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.net.keys import Identity, KeyPair, Token
from edgespec.runtime.access_policy import STAGE

COMMANDS = """
import json, logging, sys, threading

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit  # begun while an answer is awaited: nobody waits for it
            raise AssertionError(f"{name} was imported before the mistake was told")

sys.meta_path.insert(0, Absent())
from edgespec.cli.main import main

for words in json.load(sys.stdin):
    sys.argv = ["edgespec", *words]
    logging.getLogger().handlers.clear()
    try:
        main()
    except SystemExit as end:
        print("\\0", end.code, file=sys.stderr)
"""
"""Runs commands one after the other; nothing of torch can be imported, and nobody waits for it."""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as closing:
        return int(closing.getsockname()[1])


def test_each_is_one_sentence_before_torch_is_imported(tmp_path: Path) -> None:
    board = tmp_path / "board"
    stranger = Token.new(KeyPair.new().public).text
    cluster = ClusterFolder.create(tmp_path / "cluster", ClusterSettings())
    qwen = ("init", "--model", "qwen3-8b", "--cluster", str(cluster.path))
    with NodeRing(2) as ring:
        ring.await_up()
        home, away = str(ring.address), f"{HOST}:{free_port()}"
        who = ring.keys.add("board", STAGE)
        ClusterFolder.remember(board, who.own, who.coordinator, "board", home)
        removed = Identity(KeyPair.new(), who.coordinator)
        old = tmp_path / "removed"
        ClusterFolder.remember(old, removed.own, removed.coordinator, "board", home)
        join, new = ("join", "--cluster", str(board)), ("--cluster", str(tmp_path / "new"))
        cases = {
            "a stage that is none": (
                [*join, "--stage", "7"],
                "there is no stage 7: this ring has 2",
            ),
            "another cluster's token": (
                ["join", stranger, "--coordinator", home, *new],
                "is not the coordinator of the cluster",
            ),
            "a key that was removed": (["join", "--cluster", str(old)], "does not accept the key"),
            "an unknown host": (
                [*join, "--coordinator", "x.invalid"],
                "the host 'x.invalid' is unknown",
            ),
            "no listener": (
                [*join, "--coordinator", away, "--wait", "0.1"],
                f"nothing listens at {away}",
            ),
            "more stages than layers": (
                [*qwen, "--stages", "100"],
                "100 stages for a model of 36 la",
            ),
            "another draft's tokenizer": (
                [*qwen, "--stages", "2", "--draft", "llama-3.2-1b"],
                "the draft llama-3.2-1b has another tokenizer than qwen3-8b",
            ),
            "no network": (
                ["serve", "--model", "qwen3-8b", "--stages", "2", "--cluster", str(cluster.path)],
                "the hub cannot be reached; connect this machine",
            ),
        }
        commands = json.dumps([words for words, _ in cases.values()])
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS],
            input=commands,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_ENDPOINT": f"http://{away}"},
            timeout=300,
        )
    said = done.stderr.split("\0")
    assert len(said) == len(cases) + 1, done.stderr
    for name, text in zip(cases, said, strict=False):
        with case(name, text):
            assert cases[name][1] in text
            assert text.count("edgespec: error: ") == 1
            assert "Traceback" not in text
