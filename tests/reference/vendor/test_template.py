"""The tests that `hardpoint plugin new` writes still work when the plugin has kernels of every kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hardpoint.cli.main import main
from hardpoint_platforms.ops.catalogue import CONTRACTS

pytestmark = pytest.mark.reference

#: A provider of every op: the reference's under another name.
PROVIDERS = """
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.reference.providers import ReferenceProvider, reference_providers
BLOCKS = ("gated_mlp", "norm_linear", "norm_gated_mlp")
PROVIDERS = (*reference_providers(), *(ReferenceProvider(CONTRACTS[name]) for name in BLOCKS))
"""


@pytest.mark.long  # test_plugin_new does the same with the usual ops
def test_tests_of_a_plugin_with_every_op(tmp_path: Path) -> None:
    folder = tmp_path / "tried"
    assert main(["plugin", "new", "tried", "--into", str(folder)]) == 0
    device = folder / "tried_hardpoint" / "device.py"
    device.write_text(device.read_text(encoding="utf-8") + PROVIDERS, encoding="utf-8")
    info = folder / "tried_hardpoint-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tried-hardpoint\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[hardpoint.platforms]\ntried = tried_hardpoint.platform\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-k", "kernel", str(folder / "tests")]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    tested = set(re.findall(r"reference\[(\w+)-", done.stdout))
    paged = {"attention", "mla_attention", "conv_state", "ssm_scan", "gated_delta"}
    assert tested == set(CONTRACTS) - paged - {"sample", "logprobs", "verify"}
