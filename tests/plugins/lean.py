"""NVIDIA's lean runtime, in a process of its own: loads the plugin library and creates plugins from fields."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.plugins.conftest import Built

# A process of its own: a registry takes a library once, and keeps it.
SCRIPT = """
import json, sys
import numpy, tensorrt_lean as trt

library, cases = sys.argv[1], json.loads(sys.stdin.read())
registry = trt.get_plugin_registry()
assert registry.load_library(library) is not None, "the library was not loaded"
names = [c.name for c in registry.all_creators if getattr(c, "plugin_namespace", "") == "redknot"]
made, refused = [], []
for name, fields in cases:
    creator = registry.get_creator(name, "1", "redknot")
    assert creator is not None, name
    assert {f.name for f in creator.field_names} >= set(fields), name
    whole, real = trt.PluginFieldType.INT32, trt.PluginFieldType.FLOAT32
    collection = [
        trt.PluginField(key, numpy.array([value], "f4" if isinstance(value, float) else "i4"),
                        real if isinstance(value, float) else whole)
        for key, value in fields.items()
    ]
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        plugin = creator.create_plugin(name, trt.PluginFieldCollection(collection), phase)
        assert plugin is not None, (name, fields)
        made.append(name)
        spoiled = [*collection, trt.PluginField("no_such_field", numpy.zeros(1, "i4"), whole)]
        refused.append(creator.create_plugin(name, trt.PluginFieldCollection(spoiled), phase) is None)
print(json.dumps({"names": names, "made": made, "refused": all(refused), "version": trt.__version__}))
"""


def run_lean(built: Built, cases: Sequence[tuple[str, dict[str, int | float]]], folder: Path) -> dict[str, Any]:
    """Creates every (plugin, fields) in both phases, with and without a field too many; the script's report and log."""
    script = folder / "lean.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(built.plugins)],
        input=json.dumps(cases), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {"log": done.stderr}
