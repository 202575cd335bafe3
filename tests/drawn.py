"""How many examples hypothesis draws: always the same few, or with TWELLC_FUZZ_EXAMPLES so many, others each time."""

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

LONGER = os.environ.get("TWELLC_FUZZ_EXAMPLES")


def examples(count: int, steps: int = 50) -> Any:
    """Return settings for `count` examples, those of a state machine of up to so many steps."""
    return settings(
        max_examples=int(LONGER or count),
        stateful_step_count=steps,
        derandomize=LONGER is None,
        deadline=None,
        database=None,
        # Shrinking would run thousands of examples more.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
