"""What a checkpoint says of itself."""

from __future__ import annotations

import hashlib
import json

import pytest

from meshwright.trainer.checkpoint.manifest import read_manifest
from meshwright.trainer.checkpoint.restore import restore
from meshwright.trainer.config.load import from_yaml
from meshwright.trainer.state import named_leaves
from states import target_on


def test_the_manifest_says_what_was_saved(run):
    manifest = read_manifest(run.folder / "checkpoints" / "6")
    assert manifest.step == 6
    assert from_yaml(manifest.config, "manifest") == run.config
    leaves = named_leaves(run.result.state)
    assert set(manifest.leaves) == set(leaves)
    for name, leaf in leaves.items():
        described = manifest.leaves[name]
        assert (described.shape, described.dtype) == (list(leaf.shape), str(leaf.dtype))


def test_another_version_is_no_damage(run, damaged):
    file = damaged / "checkpoints" / "6" / "manifest" / "metadata"
    content = json.loads(file.read_text())
    content["manifest"]["version"] = 1
    text = json.dumps(content["manifest"], sort_keys=True).encode()
    content["seal"] = hashlib.sha256(text).hexdigest()
    file.write_text(json.dumps(content))
    target, _ = target_on(run.config)
    with pytest.raises(ValueError, match="metadata has version 1, this Meshwright reads 4"):
        restore(damaged, target, fallback=True)
