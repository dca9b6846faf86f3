"""The engine's own tests, as they are, over the stand-in: requests, faults, workspaces, memory, cache and options.

Those that start other processes are left out, because the stand-in is not in them.
"""

from __future__ import annotations

import pytest
from engine import test_faults, test_memory, test_refusals, test_requests, test_upkeep, test_workspaces
from engine.conftest import patched, stock_text
from engine.test_faults import warm
from engine.test_requests import neighbour_texts
from engine.test_upkeep import switch_often

__all__ = ["neighbour_texts", "patched", "stock_text", "switch_often", "warm"]

pytestmark = pytest.mark.usefixtures("cuda")

# Name -> why it is not for this backend.
LEFT_OUT = {
    "test_forks_work_except_while_requests_run": "another process",
    "test_the_process_exits_cleanly_whatever_the_engine_does": "another process",
    "test_requests_under_autocast_never_share_a_step_with_others": "bfloat16 sums depend on the size of a padded batch",
    "test_peak_memory_of_a_call_stays_below_padded_generates": "another process",
}
SLOW = {
    "test_a_step_that_fails_once_is_repeated",
    "test_autocast_is_not_kept_waiting_by_a_stream_of_others",
    "test_bad_submission_is_refused_at_once_and_harms_nobody",
    "test_bad_batch_is_refused_whole_and_harms_nobody",
    "test_random_use_keeps_the_books_and_the_texts",
    "test_priority_decides_who_is_preempted",
    "test_statistics_can_be_read_at_any_time",
}

for _module in (test_requests, test_refusals, test_upkeep, test_faults, test_workspaces, test_memory):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and callable(_test) and _name not in LEFT_OUT:
            globals()[_name] = pytest.mark.slow(_test) if _name in SLOW else _test
