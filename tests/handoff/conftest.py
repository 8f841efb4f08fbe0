"""Hypothesis profiles for the handoff machine.

Without one, its search is short and always the same. Longer ones, each time another:

    pytest tests/handoff/test_machine.py --hypothesis-profile=handoff-long --timeout=0
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "handoff-long",
    max_examples=2_000,
    stateful_step_count=60,
    derandomize=False,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
